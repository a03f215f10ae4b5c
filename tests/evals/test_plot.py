"""`flash-eval kernels --plot`: a picture of the measured numbers, refused before the work where it cannot be drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from flash_evals import figures, kernel_results, plot
from flash_evals.contest import Contest, Entry
from flash_evals.workload import PASSES, Heads, Pass, Workload
from matplotlib.figure import Figure


def entries(
    dtypes: tuple[str, ...] = ("float32",), query_len: int | None = None, passes: tuple[Pass, ...] = ("forward",)
) -> list[dict[str, Any]]:
    """Two lengths, the longer first; flash takes 1 ms for 1,000 keys, mlx ten times as long; each pass as the first
    and once more.
    """
    contests = []
    for dtype in dtypes:
        for keys in (2000, 1000):
            for factor, pass_ in enumerate(passes, 1):
                held = Contest(Workload(Heads(14, 2, 64), 1, query_len or keys, keys, True, None, dtype, pass_))
                held.peak_flops, held.read_bandwidth = [5e12], [2e10]
                for name, seconds in (("flash", factor * keys / 1e6), ("mlx", factor * keys / 1e5)):
                    held.entries[name] = Entry(factor * keys * 1000, 1, 0, [seconds * 0.9, seconds, seconds * 1.1])
                contests.append(held)
    machine = {"processor": "A Processor", "device": "cpu, AVX2, 2 threads"}
    return [entry | {"machine": machine} for entry in kernel_results.describe(contests)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def savefig(self: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def lines(ax: Any) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in ax.lines}


def test_series(drawn: list[Figure], tmp_path: Path) -> None:
    """Of growing length, whatever the order of the entries."""
    made = entries()
    plot.draw(tmp_path / "out.png", made)
    [figure] = drawn
    time, memory, speed = figure.axes
    assert lines(time) == {
        "flash": [(1000, pytest.approx(1)), (2000, pytest.approx(2))],
        "mlx": [(1000, pytest.approx(10)), (2000, pytest.approx(20))],
    }
    held = [pytest.approx(entry["inputs_and_outputs(MB)"]) for entry in (made[2], made[0])]
    assert lines(memory) == {
        "flash": [(1000, 1), (2000, 2)],
        "mlx": [(1000, 1), (2000, 2)],
        "bound or reference": list(zip((1000, 2000), held, strict=True)),
    }
    gflops = [pytest.approx(entry["forward"]["FLOPS(TFLOPs/s)"] * 1000) for entry in (made[2], made[0])]
    assert lines(speed)["flash"] == list(zip((1000, 2000), gflops, strict=True))
    assert lines(speed)["bound or reference"] == [(1000, 5000), (2000, 5000)]
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log", "linear"]
    assert all(ax.get_xscale() == "log" for ax in figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["flash", "mlx", "bound or reference"]
    assert figure.get_suptitle() == "attention forward, causal, batch size 1 · A Processor, cpu, AVX2, 2 threads"
    assert time.get_title(loc="left") == "14/2x64, float32"


def test_a_decode_step_is_drawn_against_the_bandwidth(drawn: list[Figure], tmp_path: Path) -> None:
    made = entries(query_len=1)
    plot.draw(tmp_path / "out.png", made)
    speed = drawn[0].axes[2]
    assert speed.get_ylabel() == "keys and values read (GB/s)"
    assert lines(speed)["flash"][0] == (1000, pytest.approx(made[2]["forward"]["read(GB/s)"]))
    assert lines(speed)["bound or reference"] == [(1000, 20), (2000, 20)]


def test_a_row_of_panels_for_each_dtype(drawn: list[Figure], tmp_path: Path) -> None:
    plot.draw(tmp_path / "out.png", entries(("float32", "bfloat16")))
    titles = [ax.get_title(loc="left") for ax in drawn[0].axes]
    assert titles == ["14/2x64, float32", "", "", "14/2x64, bfloat16", "", ""]


def test_a_row_of_panels_for_each_pass(drawn: list[Figure], tmp_path: Path) -> None:
    made = entries(("float32", "bfloat16"), passes=PASSES)
    plot.draw(tmp_path / "out.png", made)
    [figure] = drawn
    titles = [ax.get_title(loc="left") for ax in figure.axes[::3]]
    assert titles == [f"14/2x64, {dtype}, {pass_}" for dtype in ("float32", "bfloat16") for pass_ in PASSES]
    assert figure.get_suptitle().startswith("attention, causal, ")
    for number, pass_ in enumerate(PASSES):
        time, memory, speed = map(lines, figure.axes[3 * number : 3 * number + 3])
        assert time["mlx"] == [(keys, pytest.approx((number + 1) * keys / 100)) for keys in (1000, 2000)]
        assert memory["flash"] == [(keys, (number + 1) * keys / 1000) for keys in (1000, 2000)]
        assert memory["bound or reference"][0] == (1000, made[2][pass_]["inputs_and_outputs(MB)"])
        assert speed["flash"][0] == (1000, pytest.approx(made[2][pass_]["FLOPS(TFLOPs/s)"] * 1000))


def test_a_pass_is_drawn_of_those_who_finished_it(drawn: list[Figure], tmp_path: Path) -> None:
    flash, mlx, *shorter = entries(passes=("forward", "backward"))
    plot.draw(tmp_path / "out.png", [flash, mlx | {"backward": {}}, *(entry | {"backward": {}} for entry in shorter)])
    [figure] = drawn
    assert set(lines(figure.axes[0])) == {"flash", "mlx"}
    assert {name: len(line) for name, line in lines(figure.axes[3]).items()} == {"flash": 1}
    assert len(figure.axes) == 6


def test_no_bound_on_a_gpu(drawn: list[Figure], tmp_path: Path) -> None:
    nothing = {"peak(TFLOPs/s)": None, "read(GB/s)": None}
    plot.draw(tmp_path / "out.png", [entry | {"roofline": nothing} for entry in entries()])
    assert set(lines(drawn[0].axes[2])) == {"flash", "mlx"}


def test_every_implementation_has_a_look_of_its_own() -> None:
    from flash_evals.implementations import IMPLEMENTATIONS

    assert set(plot.STYLE) == set(IMPLEMENTATIONS)
    for key in ("color", "marker"):
        assert len({style[key] for style in plot.STYLE.values()}) == len(IMPLEMENTATIONS)


def test_the_command_draws(invoke: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("out.png", "out.svg"):
        options = ("--shape", "2/1x8", "--seq-len", "16,32", "--impl", "flash", "-r", 1)
        page = invoke("kernels", *options, "--plot", tmp_path / name)
        assert (page.exit_code, page.stderr) == (0, ""), page.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_other_suffixes_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused("kernels", "--plot", tmp_path / "out.gif")
    assert line.endswith("out.gif: expected a name that ends in .png or .svg")


def test_without_matplotlib_it_is_refused(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    line = refused("kernels", "--plot", tmp_path / "out.png")
    assert line == "Error: --plot needs matplotlib: pip install 'matplotlib>=3.9,<4'"


def test_a_folder_that_is_not_there_is_refused(refused: Callable[..., str]) -> None:
    assert "/no/such/folder cannot be written to" in refused("kernels", "--plot", "/no/such/folder/out.png")


def test_a_picture_that_the_disk_does_not_take(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    out = tmp_path / "out.png"
    page = invoke("kernels", "--shape", "2/1x8", "--seq-len", 16, "--impl", "flash", "-r", 1, "--plot", out)
    assert page.exit_code == 2
    assert "2/1x8" in page.stdout
    assert page.stderr == f"Error: cannot write {out}: No space left on device\n"
