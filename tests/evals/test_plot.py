"""`flash-eval kernels --plot`: a picture of the measured numbers, refused before the work where it cannot be drawn."""

from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from flash_evals import figures, plot
from flash_evals.implementations import IMPLEMENTATIONS
from flash_evals.kernel_results import Figures, Roofline
from flash_evals.workload import PASSES
from kernel_cases import GBS, GFLOPS, entries_of, timed_contest
from matplotlib.figure import Figure
from msgspec.structs import replace


def entries(dtypes=("float32",), query_len=None, passes=("forward",)):
    """Two lengths, the longer first; flash takes 1 ms for 1,000 keys, mlx ten times as long; each pass as the first
    and once more.
    """
    contests = [
        timed_contest(
            {"flash": factor * keys / 1e3, "mlx": factor * keys / 1e2},
            factor * keys * 1000,
            spread=0.1,
            query_len=query_len or keys,
            seq_len=keys,
            dtype=dtype,
            pass_=pass_,
        )
        for dtype in dtypes
        for keys in (2000, 1000)
        for factor, pass_ in enumerate(passes, 1)
    ]
    return entries_of(contests)


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """The figure that is saved for some entries."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))

    def draw(made):
        plot.draw(tmp_path / "out.png", made)
        return drawn[-1]

    return draw


def lines(ax):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in ax.lines}


def about(*values):
    """Of 1,000 and 2,000 keys."""
    return [(keys, pytest.approx(value)) for keys, value in zip((1000, 2000), values, strict=True)]


def test_series(draw):
    """Of growing length, whatever the order of the entries."""
    made = entries()
    figure = draw(made)
    short, long = made[2], made[0]
    time, memory, speed = figure.axes
    assert lines(time) == {"flash": about(1, 2), "mlx": about(10, 20)}
    held = about(*(entry.held for entry in (short, long)))
    assert lines(memory) == {"flash": about(1, 2), "mlx": about(1, 2), "bound or reference": held}
    assert lines(speed)["flash"] == about(*(entry.forward.flops * 1000 for entry in (short, long)))
    assert lines(speed)["bound or reference"] == about(GFLOPS, GFLOPS)
    without_bounds = draw([replace(entry, roofline=Roofline(None, None)) for entry in made])
    assert set(lines(without_bounds.axes[2])) == {"flash", "mlx"}
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log", "linear"]
    assert all(ax.get_xscale() == "log" for ax in figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["flash", "mlx", "bound or reference"]
    for key in ("color", "marker"):  # each implementation has a look of its own
        assert len({plot.STYLE[name][key] for name in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
    assert figure.get_suptitle() == "attention forward, causal, batch size 1 · A Processor, cpu, AVX2, 2 threads"


def test_a_decode_step_is_drawn_against_the_bandwidth(draw):
    speed = draw(entries(query_len=1)).axes[2]
    assert speed.get_ylabel() == "keys and values read (GB/s)"
    assert lines(speed)["bound or reference"] == about(GBS, GBS)


def test_a_row_of_panels_for_each_dtype_and_pass(draw):
    made = entries(("float32", "bfloat16"), passes=PASSES)
    figure = draw(made)
    titles = [ax.get_title(loc="left") for ax in figure.axes[::3]]
    assert titles == [f"14/2x64, {dtype}, {pass_}" for dtype in ("float32", "bfloat16") for pass_ in PASSES]
    assert figure.get_suptitle().startswith("attention, causal, ")
    for number, pass_ in enumerate(PASSES, 1):
        time, memory, speed = map(lines, figure.axes[3 * number - 3 : 3 * number])
        assert time["mlx"] == about(10 * number, 20 * number)
        assert memory["flash"] == about(number, 2 * number)
        assert memory["bound or reference"][0] == (1000, made[2].passes[pass_].held)
        assert speed["flash"][0] == (1000, pytest.approx(made[2].passes[pass_].flops * 1000))


def test_a_pass_is_drawn_of_those_who_finished_it(draw):
    flash, mlx, *shorter = entries(passes=("forward", "backward"))
    figure = draw([flash, replace(mlx, backward=Figures()), *(replace(entry, backward=Figures()) for entry in shorter)])
    assert set(lines(figure.axes[0])) == {"flash", "mlx"}
    assert {name: len(line) for name, line in lines(figure.axes[3]).items()} == {"flash": 1}
    assert len(figure.axes) == 6


SMALL = ("kernels", "--shape", "2/1x8", "--seq-len", "16,32", "--impl", "flash", "-r", 1)


def test_the_command_draws(invoke, refused, tmp_path, monkeypatch):
    """And says so where the disk does not take it, or where matplotlib is missing, before the work."""
    for name in ("out.png", "out.svg"):
        page = invoke(*SMALL, "--plot", tmp_path / name)
        assert (page.exit_code, page.stderr) == (0, ""), page.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"

    monkeypatch.setattr(Figure, "savefig", Mock(side_effect=OSError(28, "No space left on device")))
    page = invoke(*SMALL, "--plot", tmp_path / "out.png")
    assert page.exit_code == 2
    assert "2/1x8" in page.stdout
    assert page.stderr == f"Error: cannot write {tmp_path / 'out.png'}: No space left on device\n"
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    line = refused("kernels", "--plot", tmp_path / "out.png")
    assert line == "Error: --plot needs matplotlib: pip install 'matplotlib>=3.9,<4'"
