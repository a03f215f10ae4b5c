"""The report's charts show the numbers of the result files, on axes whose ranges include these numbers."""

import math

import pytest
from flash_evals.commands.report import DESCRIBE, Result
from flash_evals.pages.chart import TIME, Chart, Point, Series
from msgspec import convert

pytestmark = pytest.mark.slow("draws for seconds")

ARMS = ("off", "on")


def values(charts):
    """Maps each chart's title to {a line's name: [[length, value, low, high], ...]}.

    `low` and `high` are the ends of the band around the line. Points without a band do not have them.
    """
    lines = {chart.title: {line.name: line.points for line in chart.series} for chart in charts}
    return {
        title: {
            name: [pytest.approx([x for x in vars(point).values() if x is not None]) for point in points]
            for name, points in of_chart.items()
        }
        for title, of_chart in lines.items()
    }


def charts(result):
    """The charts of a result: a list of (title of a row of charts, the charts in this row)."""
    found = convert(result, Result)
    return DESCRIBE[type(found)](found).charts


def line(points, *keys, length="seq_len"):
    """The points that each arm's line must have: [length, value], or [length, value, low, high] with a band.

    `keys` are the names of the value and of the band's ends in `points`.
    """
    return {f"patch {arm}": [[at[length], *(at[arm][key] for key in keys)] for at in points] for arm in ARMS}


def test_finetune(results):
    """The band around the time of a step ranges from the 20th to the 80th percentile."""
    [(_, row)] = charts(results["finetune"])
    assert values(row) == {
        "Time of a step": line(results["finetune"]["results"], "seconds", "seconds_p20", "seconds_p80"),
        "Peak memory of a step": line(results["finetune"]["results"], "peak_memory_mb"),
    }


def chart(points, axis=TIME):
    return Chart("Title", axis, "keys", [Series("flash", "on", [Point(*point) for point in points])])


@pytest.mark.parametrize(
    ("points", "left"),
    [
        ([(1, 1.0), (2, 0.0), (4, 3.0)], [[1, 1], [4, 3]]),  # 0 has no place on a logarithmic axis
        ([(1, 1.0), (2, 1e300), (4, 3.0)], [[1, 1], [4, 3]]),
        ([(0, 1.0), (2, 2.0), (4, 3.0)], [[2, 2], [4, 3]]),
        ([(1, 1.0), (2, math.nan), (4, 3.0)], [[1, 1], [4, 3]]),
        ([(1, 1.0, None, 2.0), (2, 2.0, 0.0, 3.0), (4, 3.0, 2.0, 4.0)], [[1, 1], [2, 2], [4, 3, 2, 4]]),
        ([(4, 3.0), (1, 1.0)], [[1, 1], [4, 3]]),  # sorted by length
        ([(1, math.nan)], None),
    ],
)
def test_points_without_a_place_are_left_out(points, left):
    assert values([chart(points)])["Title"] == ({"flash": left} if left else {})
