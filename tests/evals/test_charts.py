"""The report's charts show the numbers of the result files, on axes whose ranges include these numbers."""

import math
from base64 import b64decode
from copy import deepcopy
from xml.etree import ElementTree

import pytest
from flash_evals.commands.report import DESCRIBE, Result
from flash_evals.pages import drawing, units
from flash_evals.pages.chart import MEMORY, TIME, Axis, Chart, Point, Series
from msgspec import convert

pytestmark = pytest.mark.slow("draws for seconds")

ARMS = ("off", "on")
SVG = "{http://www.w3.org/2000/svg}"
LINEAR = Axis(units.percent_tick, logarithmic=False)


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


def test_speed(results):
    """Charts show speed against length, with a band of one standard deviation above and below the line."""
    tests = deepcopy(results["speed"]["results"])  # the options were -p 8,16 -g 4 -d 0,32
    for test in tests:
        test["off"] |= {"tokens_per_s": 90.0, "tokens_per_s_sd": 5.0, "low": 85.0, "high": 95.0}
        test["on"] |= {"tokens_per_s": 190.0, "tokens_per_s_sd": 5.0, "low": 185.0, "high": 195.0}
        test["at_last"] = test["depth"] + test["tokens"]
    [(_, row)] = charts({**results["speed"], "results": tests})
    drawn, rate = values(row), ("tokens_per_s", "low", "high")
    for depth in (0, 32):
        of_depth = [test for test in tests if (test["kind"], test["depth"]) == ("prompt", depth)]
        assert drawn[f"Prompts, depth {depth}: tokens per second"] == line(of_depth, *rate, length="tokens")
    steps = [test for test in tests if test["kind"] == "generation"]
    assert drawn["Generation, 4 tokens: tokens per second"] == line(steps, *rate, length="at_last")
    assert drawn["Generation, 4 tokens: peak memory"] == line(steps, "peak_memory_mb", length="at_last")


def test_kernels(results):
    """Each dtype and pass has a row of charts. A chart has a line for each implementation that finished the pass."""
    entries = results["kernels"]
    others = [{**entry, "config": {**entry["config"], "dtype": "float16"}} for entry in entries]
    for entry in others:
        if entry["config"]["impl"] == "mlx":
            entry["backward"] = {}
    titles, rows = zip(*charts([*reversed(entries), *others]), strict=True)
    assert titles == tuple(
        f"{pass_}, 4/2x8, {dtype}, causal, prefill, batch size 1"
        for dtype in ("float32", "float16")
        for pass_ in ("forward", "backward")
    )
    lines = [list(values(row)["Time of a call"]) for row in rows]
    assert lines == [["mlx", "flash"], ["mlx", "flash"], ["flash", "mlx"], ["flash"]]
    for pass_, row in zip(("forward", "backward"), rows[:2], strict=True):
        drawn = values(row)
        for impl in ("flash", "mlx"):
            mine = [(at["config"]["seq_len"], at[pass_], at) for at in entries if at["config"]["impl"] == impl]
            keys = ("time(s)", "time_p20(s)", "time_p80(s)")
            assert drawn["Time of a call"][impl] == [[n, *(run[key] for key in keys)] for n, run, _ in mine]
            assert drawn["Memory of a call"][impl] == [[n, run["peak_memory_usage(MB)"]] for n, run, _ in mine]
            assert drawn["Share of the machine's peak"][impl] == [
                [n, run["FLOPS(TFLOPs/s)"] / at["roofline"]["peak(TFLOPs/s)"]] for n, run, at in mine
            ]
        held = [[n, run["inputs_and_outputs(MB)"]] for n, run, _ in mine]
        assert drawn["Memory of a call"]["inputs and outputs"] == held


@pytest.mark.parametrize(
    ("queries", "title", "key", "factor"),
    [(32, "GFLOP/s", "FLOPS(TFLOPs/s)", 1000), (1, "Keys and values read, GB/s", "read(GB/s)", 1)],
)
def test_kernels_without_bounds_of_the_machine(results, queries, title, key, factor):
    entry = {**results["kernels"][0], "roofline": {"peak(TFLOPs/s)": None, "read(GB/s)": None}, "backward": {}}
    entry["config"] = {**entry["config"], "query_len": queries}
    [(_, row)] = charts([entry])
    assert values(row)[title] == {"flash": [[32, factor * entry["forward"][key]]]}


def chart(points, axis=TIME):
    return Chart("Title", axis, "keys", [Series("flash", "on", [Point(*point) for point in points])])


def picture(of):
    """The root of a chart's SVG file."""
    return ElementTree.fromstring(b64decode(drawing.picture(of).removeprefix("data:image/svg+xml;base64,")))


def labels(svg, anchor):
    """The labels of an axis in order, as (position, label). anchor: "middle" for the x axis, "end" for the y axis."""
    texts = [text for text in svg.iter(f"{SVG}text") if f"text-anchor: {anchor}" in text.get("style")]
    place = "x" if anchor == "middle" else "y"
    return sorted(((float(text.get(place)), text.text) for text in texts), reverse=anchor == "end")


def ticks(axis, numbers):
    """The labels of the horizontal grid lines, from the bottom, in a chart of these values."""
    found = labels(picture(chart([(2**n, value) for n, value in enumerate(numbers)], axis)), "end")
    return [text for _, text in found]


@pytest.mark.rotate(1, default=6)
@pytest.mark.parametrize(
    ("axis", "numbers", "expected"),
    [
        (TIME, [0.003, 0.04], ["2 ms", "5 ms", "10 ms", "20 ms", "50 ms"]),
        (TIME, [1e-5, 1], ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"]),
        (TIME, [1, 1], ["1 s", "2 s"]),
        (MEMORY, [0.5, 1500], ["100 kB", "1 MB", "10 MB", "100 MB", "1 GB", "10 GB"]),
        (LINEAR, [0.1, 0.84], ["0 %", "20 %", "40 %", "60 %", "80 %"]),
        (LINEAR, [0, 0], ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]),
    ],
)
def test_ticks(axis, numbers, expected):
    assert ticks(axis, numbers) == expected


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
