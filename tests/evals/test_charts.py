"""The report's charts show the numbers of the result files, on axes whose ranges include these numbers."""

import math
import re
from base64 import b64decode
from copy import deepcopy
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from flash_evals.commands.report import DESCRIBE, Result
from flash_evals.pages import drawing, units
from flash_evals.pages.chart import MEMORY, TIME, Axis, Chart, Point, Series
from flash_evals.pages.colors import DARK, LIGHT
from flash_evals.pages.kernels_page import LOOK_OF
from flash_evals.work.implementations import IMPLEMENTATIONS
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


@pytest.mark.parametrize("low", [1e-30, 0.3, 999.9999999999999, 1e20])
@pytest.mark.parametrize("factor", [1, 1.0000001, 3, 1e9])
def test_ticks_hold_the_values(low, factor):
    shown = [float(text) for text in ticks(Axis(lambda x: f"{x:e}"), [low, low * factor])]
    assert 2 <= len(shown) <= 7
    assert shown[0] <= low * (1 + 1e-6)
    assert shown[-1] >= low * factor * (1 - 1e-6)
    assert all(math.log10(value) < math.log10(after) for value, after in pairwise(shown))


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


def test_labels_of_lengths_do_not_meet():
    shown = labels(picture(chart([(length, 1.0) for length in range(100_000, 110_000, 500)])), "middle")
    places = [place for place, text in shown if text != "keys"]
    assert len(places) > 2
    assert min(after - place for place, after in pairwise(places)) >= 45  # pixels, the width of "100,000"


def test_an_svg_is_light_and_dark():
    """A media query in the SVG replaces each colour in dark mode."""
    svg = picture(chart([(1, 1.0, 0.5, 2.0), (2, 2.0, 1.5, 3.0)]))
    drawn = {
        part for element in svg.iter() for part in re.findall("(?:fill|stroke): #[0-9a-f]{6}", element.get("style", ""))
    }
    assert drawn >= {f"stroke: {LIGHT['on']}", f"fill: {LIGHT['soft']}", f"stroke: {LIGHT['rule']}"}
    media, _, rules = svg.find(f"{SVG}style").text.partition(" { ")
    assert media == "@media screen and (prefers-color-scheme: dark)"
    instead = dict(re.findall(r'\[style\*="([^"]*)"\] { ([^}]*) !important }', rules))
    assert {instead[part] for part in drawn} == {
        part.replace(LIGHT[name], DARK[name]) for part in drawn for name in LIGHT if LIGHT[name] in part
    }


@pytest.mark.parametrize("colors", [LIGHT, DARK])
def test_lines_stand_out(colors):
    """Lines have a contrast of at least 3 to 1 with the background, as WCAG 2.2 (AA) demands."""

    def luminance(name):
        parts = [int(colors[name][at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name in ("on", "off", "naive", "torch", "soft"):
        low, high = sorted((luminance(name), luminance("card")))
        assert high / low >= 3


def test_each_implementation_has_a_look_of_its_own():
    for key in ("color", "marker"):
        assert len({drawing.LOOKS[LOOK_OF[name]][key] for name in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
