"""A chart takes whatever values there are, and its axes have round numbers that hold them."""

import math
import re
from itertools import pairwise

import pytest
from flash_evals.page import drawing, units
from flash_evals.page.chart import MEMORY, TIME, Axis, chart, point
from report_page import lines, page_of

LINEAR = Axis(units.share, units.percent_tick, logarithmic=False)


def drawn(points, axis=TIME):
    """The page of one chart."""
    return page_of(drawing.row([chart("Title", axis, "keys", [("flash", "on", points)])]))


def texts(page, anchor):
    """By their place: the labels of an axis."""
    found = [text for text in page.all("text") if f"text-anchor: {anchor}" in text.attributes["style"]]
    return {float(text.attributes["x" if anchor == "middle" else "y"]): text.text for text in found}


def ticks(axis, values):
    """What stands at the grid lines, from below."""
    return [
        text
        for _, text in sorted(
            texts(drawn([point(2**n, value) for n, value in enumerate(values)], axis), "end").items(), reverse=True
        )
    ]


@pytest.mark.parametrize(
    ("axis", "values", "expected"),
    [
        (TIME, [0.003, 0.04], ["2 ms", "5 ms", "10 ms", "20 ms", "50 ms"]),
        (TIME, [1e-5, 1], ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"]),
        (TIME, [1, 1], ["1 s", "2 s"]),
        (MEMORY, [0.5, 1500], ["100 kB", "1 MB", "10 MB", "100 MB", "1 GB", "10 GB"]),
        (LINEAR, [0.1, 0.84], ["0 %", "20 %", "40 %", "60 %", "80 %"]),
        (LINEAR, [0, 0], ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]),
    ],
)
def test_ticks(axis, values, expected):
    assert ticks(axis, values) == expected


@pytest.mark.parametrize("low", [1e-30, 1e-9, 0.3, 999.9999999999999, 1e20])
@pytest.mark.parametrize("factor", [1, 1.0000001, 3, 1e3, 1e9])
def test_ticks_hold_the_values(low, factor):
    shown = [float(text) for text in ticks(Axis(units.rate, lambda x: f"{x:e}"), [low, low * factor])]
    assert 2 <= len(shown) <= 7
    assert shown[0] <= low * (1 + 1e-6)
    assert shown[-1] >= low * factor * (1 - 1e-6)
    assert all(math.log10(value) < math.log10(after) for value, after in pairwise(shown))


@pytest.mark.parametrize(
    ("points", "left"),
    [
        ([point(1, 1.0), point(2, 0.0), point(4, 3.0)], [(1, 1), (4, 3)]),  # 0 has no logarithm
        ([point(1, 1.0), point(2, 1e300), point(4, 3.0)], [(1, 1), (4, 3)]),
        ([point(0, 1.0), point(2, 2.0), point(4, 3.0)], [(2, 2), (4, 3)]),
        ([point(1, 1.0), point(2, None), point(4, 3.0)], [(1, 1), (4, 3)]),
        ([point(1, 1.0, None, 2.0), point(2, 2.0, 0.0, 3.0), point(4, 3.0, 2.0, 4.0)], [(1, 1), (2, 2), (4, 3, 2, 4)]),
        ([point(4, 3.0), point(1, 1.0)], [(1, 1), (4, 3)]),  # by growing length
    ],
)
def test_what_has_no_place_is_left_out(points, left):
    assert lines(drawn(points)) == {"flash": left}


def test_labels_of_lengths_do_not_meet():
    labels = texts(drawn([point(length, 1.0) for length in range(100_000, 110_000, 500)]), "middle")
    del labels[max(labels, key=lambda x: labels[x] == "keys")]
    assert len(labels) > 2
    assert min(after - x for x, after in pairwise(sorted(labels))) >= 45  # as wide as 100,000


def test_it_is_drawn_in_the_colours_of_the_page():
    """By the names that the style sheet gives them for light, dark and paper; and without an id, of which others
    would have the same.
    """
    page = drawn([point(1, 1.0, 0.5, 2.0), point(2, 2.0, 1.5, 3.0)])
    styles = " ".join(part.attributes.get("style", "") for part in page.all())
    assert {"var(--on)", "var(--soft)", "var(--rule)", "var(--card)"} == set(re.findall(r"var\([^)]*\)", styles))
    assert "#" not in styles
    assert not any({"id", "clip-path"} & part.attributes.keys() for part in page.all())


@pytest.mark.parametrize("points", [[], [point(1, 1.0)], [point(1, None), point(2, 1.0)]])
def test_no_line_is_no_plot(points):
    assert drawn(points).all() == []
