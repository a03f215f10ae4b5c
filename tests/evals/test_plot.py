"""`--plot`: the charts of the page in a file."""

from xml.etree import ElementTree

import pytest
from flash_evals.implementations import IMPLEMENTATIONS
from flash_evals.kernels_result import Figures, Roofline
from flash_evals.page import drawing
from flash_evals.page.kernels import LOOK_OF, description
from flash_evals.workload import PASSES
from kernel_cases import entries_of, timed_contest
from msgspec.structs import replace

SVG = "{http://www.w3.org/2000/svg}"


def entries(dtypes=("float32",), passes=("forward",)):
    """Two lengths, the longer first; flash takes 1 ms for 1,000 keys, mlx ten times as long; each pass as the first
    and once more.
    """
    contests = [
        timed_contest(
            {"flash": factor * keys / 1e3, "mlx": factor * keys / 1e2},
            factor * keys * 1000,
            query_len=keys,
            seq_len=keys,
            dtype=dtype,
            pass_=pass_,
        )
        for dtype in dtypes
        for keys in (2000, 1000)
        for factor, pass_ in enumerate(passes, 1)
    ]
    return entries_of(contests)


def drawn(made):
    """For each row of charts its title, and of each chart the values of each line."""
    return {
        title: {
            chart.title: {line.name: pytest.approx([point.value for point in line.points]) for line in chart.series}
            for chart in charts
        }
        for title, charts in description(made).charts
    }


def texts(file):
    return {text.text for text in ElementTree.parse(file).iter(f"{SVG}text")}


def test_a_row_of_charts_for_each_dtype_and_pass():
    """Of growing length, whatever the order of the entries; without bounds of the machine in its own unit."""
    rows = drawn(entries(("float32", "bfloat16"), passes=PASSES))
    assert list(rows) == [
        f"{pass_}, 14/2x64, {dtype}, causal, prefill, batch size 1"
        for dtype in ("float32", "bfloat16")
        for pass_ in PASSES
    ]
    for number, charts in enumerate(rows.values()):
        factor = number % len(PASSES) + 1
        assert charts["Time of a call"]["mlx"] == [factor * 1e-2, factor * 2e-2]
        assert charts["Memory of a call"]["flash"] == [factor, 2 * factor]
    made = [replace(entry, roofline=Roofline(None, None)) for entry in entries()]
    [charts] = drawn(made).values()
    assert charts["GFLOP/s"]["flash"] == [1000 * made[at].forward.flops for at in (2, 0)]


def test_a_pass_is_drawn_of_those_who_finished_it():
    flash, mlx, *shorter = entries(passes=("forward", "backward"))
    made = [flash, replace(mlx, backward=Figures()), *(replace(entry, backward=Figures()) for entry in shorter)]
    assert [list(charts["Time of a call"]) for charts in drawn(made).values()] == [["flash", "mlx"], ["flash"]]


def test_a_chart_of_which_nothing_has_a_place_is_left_out(tmp_path):
    made = entries()
    for entry in made:
        entry.forward.peak_memory = entry.forward.held = 0  # has no logarithm
    drawing.save(tmp_path / "out.svg", "Title", description(made).charts)
    assert texts(tmp_path / "out.svg") >= {"Title", "Time of a call", "Share of the machine's peak"}
    assert "Memory of a call" not in texts(tmp_path / "out.svg")


def test_each_implementation_has_a_look_of_its_own():
    for key in ("color", "marker"):
        assert len({drawing.LOOKS[LOOK_OF[name]][key] for name in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)


SMALL = ("kernels", "--shape", "2/1x8", "--seq-len", "16,32", "--impl", "flash,mlx", "-r", 1)


def test_the_command_draws(invoke, tmp_path):
    """A single length, too. An SVG stands by itself, and has words for who cannot see it. Its colours are attributes,
    for programs that know no variables; a style sheet has the dark ones.
    """
    for name in ("out.png", "out.svg", "one.svg"):
        page = invoke(*SMALL, *(["--seq-len", 16] if name == "one.svg" else []), "--plot", tmp_path / name)
        assert (page.exit_code, page.stderr) == (0, ""), page.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for name in ("out.svg", "one.svg"):
        picture = ElementTree.parse(tmp_path / name).getroot()
        assert (picture.tag, picture.get("role")) == (f"{SVG}svg", "img")
        assert picture.get("aria-label").startswith("attention forward, causal, batch size 1 · ")
        assert {"Time of a call", "Memory of a call", "flash", "mlx", "keys", "16"} <= texts(tmp_path / name)
        lines = [line for line in picture.iter(f"{SVG}path") if line.get("class") == "line"]
        assert lines[0].get("stroke") == drawing.LIGHT["on"]
        assert f'[stroke="{drawing.LIGHT["on"]}"]' in picture.findtext(f"{SVG}style")
        markup = (tmp_path / name).read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not any(word in markup for word in ("http", "href", 'style="'))


def test_a_full_disk_keeps_the_page_and_says_so(invoke, tmp_path):
    for name in ("full.png", "full.svg"):
        full = tmp_path / name
        full.symlink_to("/dev/full")
        page = invoke(*SMALL, "--plot", full)
        assert page.exit_code == 2
        assert "2/1x8" in page.stdout
        assert page.stderr == f"Error: cannot write {full}: No space left on device\n"
