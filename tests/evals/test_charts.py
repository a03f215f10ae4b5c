"""The report's charts show the numbers of the result files, on axes whose ranges include these numbers."""

import math

import pytest
from flash_evals.commands.report import DESCRIBE, Result
from flash_evals.pages.chart import TIME, Chart, Point, Series
from flash_evals.results.arms import ARMS
from msgspec import convert

pytestmark = pytest.mark.slow("draws for seconds")


def test_finetune(results):
    """The band around the time of a step ranges from the 20th to the 80th percentile."""
    found = convert(results["finetune"], Result)
    [(_, charts)] = DESCRIBE[type(found)](found).charts
    assert [chart.title for chart in charts] == ["Time of a step", "Peak memory of a step"]
    for chart, keys in zip(charts, (["seconds", "seconds_p20", "seconds_p80"], ["peak_memory_mb"]), strict=True):
        assert {line.name: line.points for line in chart.series} == {
            f"patch {arm}": [
                Point(at["seq_len"], *(at[arm][key] for key in keys)) for at in results["finetune"]["results"]
            ]
            for arm in ARMS
        }


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
    chart = Chart("Title", TIME, "keys", [Series("flash", "on", [Point(*point) for point in points])])
    assert [line.points for line in chart.series] == ([[Point(*point) for point in left]] if left else [])
