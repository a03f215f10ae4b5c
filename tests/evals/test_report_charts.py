"""`flash-eval report`: a plot takes whatever values there are, and its axes have round numbers that hold them."""

import math
import re
from itertools import pairwise

import pytest
from flash_evals.page import chart, units
from flash_evals.page.chart import HEIGHT, WIDTH, Axis, Point, Series

LINEAR = Axis(units.share, units.percent_tick, logarithmic=False)


def drawn(points, axis=chart.TIME):
    picture = chart.lines("Title", axis, "keys", [Series("flash", "on", points)])
    assert picture is not None
    return picture


def ticks(axis, values):
    """What stands at the grid lines, from below."""
    picture = drawn([Point(2**n, value) for n, value in enumerate(values)], axis)
    assert all(float(x) <= WIDTH for x in re.findall(r' x="([^"]+)"', picture))
    assert all(0 <= float(y) <= HEIGHT for y in re.findall(r' c?y="([^"]+)"', picture))
    return re.findall(r'text-anchor="end">([^<]+)<', picture)


@pytest.mark.parametrize(
    ("axis", "values", "expected"),
    [
        (chart.TIME, [0.003, 0.04], ["2 ms", "5 ms", "10 ms", "20 ms", "50 ms"]),
        (chart.TIME, [1e-5, 1], ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"]),
        (chart.TIME, [1, 1], ["1 s", "2 s"]),
        (chart.MEMORY, [0.5, 1500], ["100 kB", "1 MB", "10 MB", "100 MB", "1 GB", "10 GB"]),
        (LINEAR, [0.1, 0.84], ["0 %", "50 %", "100 %"]),
        (LINEAR, [0, 0], ["0 %", "50 %"]),
        (LINEAR, [0.001, 1.3], ["0 %", "50 %", "100 %", "150 %"]),
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
    ("points", "lengths"),
    [
        ([Point(1, 1.0), Point(2, 0.0), Point(4, 3.0)], [1, 4]),  # 0 has no logarithm
        ([Point(1, 1.0), Point(2, 1e300), Point(4, 3.0)], [1, 4]),
        ([Point(0, 1.0), Point(2, 2.0), Point(4, 3.0)], [2, 4]),
        ([Point(4, 3.0), Point(1, 1.0)], [1, 4]),  # by growing length
    ],
)
def test_what_has_no_place_is_left_out(points, lengths):
    assert [int(length) for length in re.findall(r'data-length="(\d+)"', drawn(points))] == lengths


def test_labels_of_lengths_do_not_meet():
    picture = drawn([Point(length, 1.0) for length in range(1000, 1100, 5)])
    places = [float(x) for x in re.findall(r'<text x="([^"]+)" y="197"', picture)]
    assert len(places) > 2
    assert min(b - a for a, b in pairwise(places)) >= chart.ROOM
