"""A chart takes whatever values there are, and its axes have round numbers that hold them."""

import math
import re
from itertools import pairwise

import pytest
from flash_evals.page import drawing, units
from flash_evals.page.chart import MEMORY, TIME, Axis, Chart, Point, Series
from report_page import lines, page_of

LINEAR = Axis(units.share, units.percent_tick, logarithmic=False)


def drawn(points, axis=TIME):
    """The page of one chart."""
    return page_of(drawing.row("", [Chart("Title", axis, "keys", [Series("flash", "on", points)])]))


def texts(page, anchor):
    """By their place: the labels of an axis."""
    found = page.all(f"text[@text-anchor='{anchor}']")
    return {float(text.attributes["x" if anchor == "middle" else "y"]): text.text for text in found}


def ticks(axis, values):
    """What stands at the grid lines, from below."""
    page = drawn([Point(2**n, value) for n, value in enumerate(values)], axis)
    return [text for _, text in sorted(texts(page, "end").items(), reverse=True)]


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
        ([(1, 1.0), (2, 0.0), (4, 3.0)], [(1, 1), (4, 3)]),  # 0 has no logarithm
        ([(1, 1.0), (2, 1e300), (4, 3.0)], [(1, 1), (4, 3)]),
        ([(0, 1.0), (2, 2.0), (4, 3.0)], [(2, 2), (4, 3)]),
        ([(1, 1.0), (2, math.nan), (4, 3.0)], [(1, 1), (4, 3)]),
        ([(1, 1.0, None, 2.0), (2, 2.0, 0.0, 3.0), (4, 3.0, 2.0, 4.0)], [(1, 1), (2, 2), (4, 3, 2, 4)]),
        ([(4, 3.0), (1, 1.0)], [(1, 1), (4, 3)]),  # by growing length
        ([], None),
        ([(1, 1.0)], None),  # no line is no plot
        ([(1, math.nan), (2, 1.0)], None),
    ],
)
def test_what_has_no_place_is_left_out(points, left):
    assert lines(drawn([Point(*point) for point in points])) == ({"flash": left} if left else {})


def test_labels_of_lengths_do_not_meet():
    labels = texts(drawn([Point(length, 1.0) for length in range(100_000, 110_000, 500)]), "middle")
    del labels[max(labels, key=lambda x: labels[x] == "keys")]
    assert len(labels) > 2
    assert min(after - x for x, after in pairwise(sorted(labels))) >= 45  # as wide as 100,000


def test_it_is_drawn_in_the_colours_of_the_page():
    """The light ones, for which the style sheet has others, dark and on paper; and without an id, of which others would
    have the same.
    """
    page = drawn([Point(1, 1.0, 0.5, 2.0), Point(2, 2.0, 1.5, 3.0)])
    colors = {part.attributes.get(paint) for part in page.all() for paint in ("fill", "stroke")} - {None, "none"}
    assert colors == {drawing.LIGHT[name] for name in ("on", "soft", "rule", "card")}
    media, rules = drawing.STYLESHEET.rpartition("@media ")[2].split(" { ", 1)
    assert media == "(prefers-color-scheme: dark), print"
    for paint in ("fill", "stroke"):
        instead = dict(re.findall(rf'\[{paint}="(#\w+)"\] {{ {paint}: var\(--(\w+)\) }}', rules))
        assert instead == {color: name for name, color in drawing.LIGHT.items()}
    assert not any({"id", "clip-path", "style", "font-family"} & part.attributes.keys() for part in page.all())
