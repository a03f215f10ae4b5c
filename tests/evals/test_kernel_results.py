"""The result file and the page of `flash-eval kernels`."""

import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flash_evals import contest, kernel_results
from flash_evals.contest import Contest
from flash_evals.workload import PASSES, Heads, Pass
from kernel_cases import GBS, GFLOPS, workload

pytestmark = pytest.mark.usefixtures("quick_machine")


def test_json(run_kernels: Callable[..., Any]) -> None:
    entries, _ = run_kernels("--impl", "naive,flash", "--batch-size", 2, "--window", 9, "--query-len", 16, "--seed", 3)
    assert [entry["config"].pop("impl") for entry in entries] == ["flash", "naive"]
    for entry in entries:
        assert entry["config"] == {
            "batch_size": 2,
            "seq_len": 32,
            "query_len": 16,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "causal": True,
            "window": 9,
            "dtype": "float32",
            "kv_bits": None,
            "device": "cpu",
        }
        forward, work = entry["forward"], workload(batch_size=2, query_len=16, window=9)
        seconds = forward["time(s)"]
        assert len(forward["trials(s)"]) == 3
        assert seconds == statistics.median(forward["trials(s)"])
        assert forward["time_p20(s)"] == pytest.approx(np.quantile(forward["trials(s)"], 0.2))
        assert forward["time_p80(s)"] == pytest.approx(np.quantile(forward["trials(s)"], 0.8))
        assert forward["FLOPS(TFLOPs/s)"] == pytest.approx(work.flops / seconds / 1e12)
        assert forward["read(GB/s)"] == pytest.approx(work.bytes_read / seconds / 1e9)
        assert (entry["backward"], entry["forward_backward"]) == ({}, {})
        assert entry["peak_memory_usage(MB)"] == forward["peak_memory_usage(MB)"] >= 0
        assert entry["inputs_and_outputs(MB)"] == forward["inputs_and_outputs(MB)"] == work.bytes_held / 1e6
        assert entry["roofline"] == pytest.approx({"peak(TFLOPs/s)": GFLOPS / 1e3, "read(GB/s)": GBS})
        settings = entry["settings"]
        assert (settings["repetitions"], settings["max_seconds"], settings["seed"]) == (3, 30, 3)
        assert settings["interrupted"] is False
        assert entry["machine"]["versions"]["mlx"]
        assert "torch" not in entry["machine"]["versions"]


def timed_entry(name: str, milliseconds: float, **changes: Any) -> dict[str, Any]:
    """Three trials of the same length, of a forward pass."""
    held = timed_contest({name: milliseconds}, **changes)
    [entry] = kernel_results.describe([held])
    return entry | SHARED


SHARED = {"settings": {"interrupted": False}, "machine": {"device": "cpu, AVX2, 2 threads"}}


def timed_contest(milliseconds: dict[str, float], memory: int = 2_500_000, **changes: Any) -> Contest:
    held = Contest(workload(heads=Heads(14, 2, 64), **changes))
    held.peak_flops, held.read_bandwidth = [GFLOPS * 1e9], [GBS * 1e9]
    for name, time in milliseconds.items():
        held.entries[name] = contest.Entry(memory, 1, 0, [time / 1e3] * 3)
    return held


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("   ") if cell.strip()]


def test_page() -> None:
    times = {"flash": 0.1, "mlx": 1.0, "torch": 0.08}
    page = kernel_results.render([timed_entry(name, time, query_len=32) for name, time in times.items()])
    header, blank, titles, *rows = page.splitlines()
    assert header == (
        "attention forward, causal, batch size 1 · cpu, AVX2, 2 threads · peak 100 GFLOP/s, reads 10 GB/s"
    )
    assert blank == ""
    assert cells(titles) == (
        ["shape", "dtype", "queries", "keys", "impl", "time", "GFLOP/s", "of peak", "flash is", "memory", "trials"]
    )
    gflops = 4 * 64 * 14 * (32 * 33 // 2) / 1e-4 / 1e9  # 18.9
    assert list(map(cells, rows)) == [
        ["14/2x64", "float32", "32", "32", "flash", "100 µs (100–100)", f"{gflops:.1f}", "19%", "2.5 MB", "3"],
        ["mlx", "1.00 ms (1.00–1.00)", f"{gflops / 10:.1f}", "1.9%", "10.00x faster", "2.5 MB", "3"],
        ["torch", "80.0 µs (80.0–80.0)", f"{gflops / 0.8:.1f}", "24%", "1.25x slower", "2.5 MB", "3"],
    ]


def of_three_passes(**changes: Any) -> list[Contest]:
    """Flash and mlx; mlx has not finished a trial of forward_backward."""
    times = {"forward": (0.1, 1), "backward": (0.25, 2), "forward_backward": (0.3, None)}
    return [
        timed_contest(
            {"flash": flash, **({"mlx": mlx} if mlx else {})}, 1_000_000 * number, **{**changes, "pass_": pass_}
        )
        for number, (pass_, (flash, mlx)) in enumerate(times.items(), 1)
    ]


def test_passes_share_an_entry() -> None:
    flash, mlx = kernel_results.describe(of_three_passes())
    assert (flash["config"]["impl"], mlx["config"]["impl"]) == ("flash", "mlx")
    assert mlx["forward_backward"] == {}
    for number, pass_ in enumerate(PASSES, 1):
        work = workload(heads=Heads(14, 2, 64), pass_=pass_)
        assert flash[pass_]["FLOPS(TFLOPs/s)"] == pytest.approx(work.flops / flash[pass_]["time(s)"] / 1e12)
        assert flash[pass_]["peak_memory_usage(MB)"] == number
        assert flash[pass_]["inputs_and_outputs(MB)"] == work.bytes_held / 1e6
        assert ("read(GB/s)" in flash[pass_]) is (pass_ == "forward")
    assert (flash["peak_memory_usage(MB)"], mlx["peak_memory_usage(MB)"]) == (3, 2)
    assert flash["inputs_and_outputs(MB)"] == mlx["inputs_and_outputs(MB)"] == work.bytes_held / 1e6
    assert flash["roofline"] == pytest.approx({"peak(TFLOPs/s)": GFLOPS / 1e3, "read(GB/s)": GBS})


def test_page_of_several_passes() -> None:
    """What the rows of a problem share stands in the first, and the pass in the first of its own."""
    contests = [*of_three_passes(), *of_three_passes(seq_len=64)]
    page = kernel_results.render([entry | SHARED for entry in kernel_results.describe(contests)])
    header, _, titles, *rows = page.splitlines()
    assert header.startswith("attention, causal, batch size 1 · cpu")
    assert cells(titles)[3:7] == ["keys", "pass", "impl", "time"]
    gflops = 2 * 64 * 14 * (32 * 33 // 2) / 1e-3 / 1e9  # of one product in a millisecond
    problem = ["14/2x64", "float32", "32", "32"]
    assert list(map(cells, rows[:5])) == [
        [*problem, "forward", "flash", "100 µs (100–100)", f"{gflops * 20:.1f}", "19%", "1.0 MB", "3"],
        ["mlx", "1.00 ms (1.00–1.00)", f"{gflops * 2:.1f}", "1.9%", "10.00x faster", "1.0 MB", "3"],
        ["backward", "flash", "250 µs (250–250)", f"{gflops * 20:.1f}", "19%", "2.0 MB", "3"],
        ["mlx", "2.00 ms (2.00–2.00)", f"{gflops * 2.5:.1f}", "2.4%", "8.00x faster", "2.0 MB", "3"],
        ["forward_backward", "flash", "300 µs (300–300)", f"{gflops * 70 / 3:.1f}", "22%", "3.0 MB", "3"],
    ]
    assert cells(rows[5])[:6] == ["14/2x64", "float32", "32", "64", "forward", "flash"]
    assert rows[10:] == [
        "",
        "flash against mlx, forward: 10.00x (10.00x–10.00x over 2 shapes)",
        "flash against mlx, backward: 8.00x (8.00x–8.00x over 2 shapes)",
    ]


@pytest.mark.parametrize("pass_", PASSES)
def test_page_of_one_pass_says_which(run_kernels: Callable[..., Any], pass_: Pass) -> None:
    entries, page = run_kernels("--pass", pass_, "--impl", "flash,naive")
    assert page.startswith(f"attention {pass_}, causal, batch size 1 · ")
    assert "pass" not in cells(page.splitlines()[2])
    assert [[name for name in PASSES if entry[name]] for entry in entries] == [[pass_]] * 2


def test_page_of_a_decode_step() -> None:
    page = kernel_results.render([timed_entry("flash", 0.01, query_len=1, seq_len=32)])
    titles, row = map(cells, page.splitlines()[2:])
    assert titles[6:8] == ["K/V GB/s", "of reads"]
    gbs = 2 * 2 * 32 * 64 * 4 / 1e-5 / 1e9
    assert row[6:8] == [f"{gbs:.1f}", f"{gbs / GBS:.0%}"]


def test_on_a_gpu_there_are_no_bounds(run_kernels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(default_device=lambda: "gpu", gpu="gpu", synchronize=lambda: None)
    monkeypatch.setattr(contest, "mx", gpu)
    entries, page = run_kernels("--impl", "flash")
    assert entries[0]["roofline"] == {"peak(TFLOPs/s)": None, "read(GB/s)": None}
    assert "%" not in page
    assert "peak 1" not in page


def test_without_flash_there_is_nothing_to_be_faster_than(run_kernels: Callable[..., Any]) -> None:
    entries, page = run_kernels("--impl", "mlx,naive", "--seq-len", "16,32")
    assert len(entries) == 4
    assert "faster" not in page
    assert "slower" not in page
    assert "against" not in page


def test_csv_has_a_row_for_each_trial(run_kernels: Callable[..., Any], tmp_path: Path) -> None:
    entries, _ = run_kernels("--impl", "flash,naive", "--pass", "forward,backward", "--csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["impl"], row["pass"], row["trial"], float(row["time(s)"])) for row in rows] == [
        (entry["config"]["impl"], pass_, str(number), seconds)
        for entry in entries
        for pass_ in ("forward", "backward")
        for number, seconds in enumerate(entry[pass_]["trials(s)"])
    ]
    assert len(rows) == 2 * 2 * 3
    assert {row["seq_len"] for row in rows} == {"32"}
