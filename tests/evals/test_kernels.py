"""`flash-eval kernels`: what it makes of its options, what it refuses, and what is left after Ctrl-C."""

import json
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from flash_evals import kernel_results
from flash_evals.workload import PASSES

Invoke = Callable[..., click.testing.Result]

pytestmark = pytest.mark.usefixtures("quick_machine")


def test_every_shape_dtype_and_length(run_kernels: Callable[..., Any]) -> None:
    entries, page = run_kernels(
        *("--shape", "4/2x8,2/1x16", "--dtype", "float32,float16", "--seq-len", "16, 32", "--impl", "flash,mlx")
    )
    assert [
        (
            entry["config"]["head_dim"],
            entry["config"]["dtype"],
            entry["config"]["seq_len"],
            entry["config"]["query_len"],
        )
        for entry in entries[::2]
    ] == [(dim, dtype, keys, keys) for dim in (8, 16) for dtype in ("float32", "float16") for keys in (16, 32)]
    contests = kernel_results.by_workload(entries)
    assert len(contests) == 8
    ratios = [each["mlx"]["forward"]["time(s)"] / each["flash"]["forward"]["time(s)"] for each in contests]
    mean, low, high = statistics.geometric_mean(ratios), min(ratios), max(ratios)
    assert page.splitlines()[-1] == f"flash against mlx: {mean:,.2f}x ({low:,.2f}x–{high:,.2f}x over 8 shapes)"


def test_passes_are_measured_on_the_same_numbers(run_kernels: Callable[..., Any]) -> None:
    entries, _ = run_kernels("--pass", "backward,forward", "--impl", "flash,naive", "--seq-len", "16,32")
    assert [(entry["config"]["seq_len"], entry["config"]["impl"]) for entry in entries] == [
        (keys, name) for keys in (16, 32) for name in ("flash", "naive")
    ]
    for entry in entries:
        assert [len(entry[pass_].get("trials(s)", ())) for pass_ in PASSES] == [3, 3, 0]


def test_quick_changes_defaults_and_nothing_that_is_given(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("kernels", "--quick", "--shape", "2/1x8", "--impl", "flash", "--json", out)
    for more, lengths, trials in (([], [128, 512], 3), (["--seq-len", 16, "-r", 2], [16], 2)):
        assert invoke(*arguments, *more).exit_code == 0
        entries = json.loads(out.read_text())
        assert [entry["config"]["seq_len"] for entry in entries] == lengths
        assert {len(entry["forward"]["trials(s)"]) for entry in entries} == {trials}
        assert {entry["settings"]["max_seconds"] for entry in entries} == {2}


@pytest.fixture
def interrupt_at(fake_implementation: Callable[..., None]) -> Callable[[int], None]:
    """Sends this process a SIGINT in that call of naive."""

    def arrange(number: int) -> None:
        calls: list[None] = []

        def before() -> None:
            calls.append(None)
            if len(calls) == number:
                signal.raise_signal(signal.SIGINT)

        fake_implementation("naive", before=before)

    return arrange


WARM_UP = 2  # calls of each implementation and configuration


@pytest.mark.parametrize(
    ("trial", "kept"),
    [
        (1, [(32, "flash", 1)]),
        (2, [(32, "flash", 1), (32, "naive", 1)]),  # in the second round flash comes after it
    ],
)
def test_ctrl_c_keeps_what_is_finished(
    invoke: Invoke, interrupt_at: Callable[[int], None], tmp_path: Path, trial: int, kept: list[tuple[int, str, int]]
) -> None:
    """In that trial of naive, of the second of three lengths."""
    out = tmp_path / "out.json"
    interrupt_at(WARM_UP + 2 + WARM_UP + trial)
    options = ("--shape", "2/1x8", "--seq-len", "16,32,48", "--impl", "flash,naive", "-r", 2, "--json", out)
    page = invoke("kernels", *options)
    assert (page.exit_code, page.stderr) == (130, "")
    entries = json.loads(out.read_text())
    finished = [
        (entry["config"]["seq_len"], entry["config"]["impl"], len(entry["forward"]["trials(s)"])) for entry in entries
    ]
    assert ("flash against naive" in page.stdout) is (len(kept) == 2)  # a single ratio needs no mean
    assert finished == [(16, "flash", 2), (16, "naive", 2), *kept]
    assert all(entry["settings"]["interrupted"] for entry in entries)
    assert page.stdout.endswith("Interrupted; the figures are of the trials that were finished.\n")


def test_ctrl_c_between_two_passes(invoke: Invoke, interrupt_at: Callable[[int], None], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    interrupt_at(WARM_UP + 2 + WARM_UP)
    options = ("--shape", "2/1x8", "--seq-len", 16, "--impl", "flash,naive", "-r", 2, "--json", out)
    page = invoke("kernels", "--pass", "forward_backward,backward", *options)
    assert (page.exit_code, page.stderr) == (130, "")
    entries = json.loads(out.read_text())
    assert [entry["backward"] for entry in entries] == [{}, {}]
    assert [len(entry["forward_backward"]["trials(s)"]) for entry in entries] == [2, 2]
    assert page.stdout.startswith("attention forward_backward, ")


def test_ctrl_c_before_anything_is_measured(invoke: Invoke, interrupt_at: Callable[[int], None]) -> None:
    interrupt_at(WARM_UP)
    page = invoke("kernels", "--shape", "2/1x8", "--seq-len", 16, "--impl", "flash,naive")
    assert (page.exit_code, page.stdout) == (130, "")
    assert page.stderr == "Interrupted: nothing was measured.\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "14x64"], "--shape takes query heads / key-value heads x head_dim, such as 14/2x64, separated by"),
        (["--shape", "14/3x64"], "not '14/3x64'"),
        (["--shape", "14/2x64,0/1x64"], "not '14/2x64,0/1x64'"),
        (["--shape", "14/0x64"], "not '14/0x64'"),
        (["--seq-len", "many"], "--seq-len takes numbers of keys separated by commas, not 'many'"),
        (["--seq-len", "0"], "--seq-len takes numbers of keys separated by commas, not '0'"),
        (["--seq-len", "00"], "--seq-len takes numbers of keys separated by commas, not '00'"),
        (["--dtype", "float64"], "--dtype takes float32, float16, bfloat16 separated by commas, not 'float64'"),
        (["--pass", "both"], "--pass takes forward, backward, forward_backward separated by commas, not 'both'"),
        (
            ["--pass", "forward,backward", "--query-len", "1"],
            "--pass backward takes at least 2 queries: a single one is",
        ),
        (["--pass", "forward_backward", "--seq-len", "1,32"], "--pass forward_backward takes at least 2 queries"),
        (["--impl", "flash,xla"], "--impl takes flash, mlx, naive, torch separated by commas, not 'flash,xla'"),
        (["--impl", "flash,torch"], "--impl torch: it is not installed: pip install torch==2.13.0"),
        (["--batch-size", "0"], "-b must be at least 1, not 0"),
        (["--query-len", "0"], "--query-len must be at least 1, not 0"),
        (["--query-len", "40"], "--query-len must be at most --seq-len, 32, not 40"),
        (["--window", "0"], "--window must be at least 1, not 0"),
        (["--window", "4", "--no-causal"], "--window 4 is causal, and does not go with --no-causal"),
        (["-r", "0"], "-r must be at least 1, not 0"),
        (["--max-seconds", "-1"], "--max-seconds must be at least 0, not -1.0"),
        (["--max-seconds", "nan"], "--max-seconds must be at least 0, not nan"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--kv-bits", "5"], "--kv-bits takes none, 2, 3, 4, 6, 8 separated by commas, not '5'"),
        (
            ["--kv-bits", "8", "--shape", "4/2x8"],
            "--kv-bits takes head_dims that are multiples of 64, its groups, not 8",
        ),
        (["--kv-bits", "8", "--pass", "forward,backward"], "--kv-bits goes with --pass forward"),
        (["--kv-bits", "8", "--impl", "naive"], "--kv-bits goes with --impl flash, mlx, not naive"),
    ],
)
def test_refused(refused: Callable[..., str], arguments: list[str], says: str) -> None:
    assert says in refused("kernels", "--seq-len", 32, *arguments)


def test_what_an_implementation_does_not_cover(refused: Callable[..., str]) -> None:
    line = refused("kernels", "--shape", "1/1x600", "--seq-len", 8)
    assert line.startswith("Error: flash cannot compute 1/1x600, 8 queries, 8 keys, causal, float32: ")
    assert "600" in line.partition("float32: ")[2]


def test_more_queries_than_keys_where_all_see_all(run_kernels: Callable[..., Any]) -> None:
    assert run_kernels("--query-len", 40, "--no-causal", "--impl", "flash,naive")
