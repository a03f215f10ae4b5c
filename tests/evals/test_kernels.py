"""`flash-eval kernels`: what it makes of its options, the result file and the page, and what is left after Ctrl-C."""

import csv
import json
import re
import signal
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from flash_evals import contest, kernel_results
from flash_evals.contest import Contest
from flash_evals.workload import PASSES, Heads
from kernel_cases import GBS, GFLOPS, workload

pytestmark = pytest.mark.usefixtures("quick_machine")


def test_json(run_kernels):
    entries, _ = run_kernels("--impl", "naive,flash", "--batch-size", 2, "--window", 9, "--query-len", 16, "--seed", 3)
    assert [entry["config"].pop("impl") for entry in entries] == ["flash", "naive"]
    for entry in entries:
        lengths = {"batch_size": 2, "seq_len": 32, "query_len": 16, "window": 9}
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32", "kv_bits": None}
        assert entry["config"] == {**lengths, **shape, "causal": True, "device": "cpu"}
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


def timed_entry(name, milliseconds, **changes):
    """Three trials of the same length, of a forward pass."""
    held = timed_contest({name: milliseconds}, **changes)
    [entry] = kernel_results.describe([held])
    return entry | SHARED


SHARED = {"settings": {"interrupted": False}, "machine": {"device": "cpu, AVX2, 2 threads"}}


def timed_contest(milliseconds, memory=2_500_000, **changes):
    held = Contest(workload(heads=Heads(14, 2, 64), **changes))
    held.peak_flops, held.read_bandwidth = [GFLOPS * 1e9], [GBS * 1e9]
    for name, time in milliseconds.items():
        held.entries[name] = contest.Entry(memory, 1, 0, [time / 1e3] * 3)
    return held


def cells(line):
    return [cell.strip() for cell in line.split("   ") if cell.strip()]


def test_page():
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


def of_three_passes(**changes):
    """Flash and mlx; mlx has not finished a trial of forward_backward."""
    times = {"forward": (0.1, 1), "backward": (0.25, 2), "forward_backward": (0.3, None)}
    return [
        timed_contest(
            {"flash": flash, **({"mlx": mlx} if mlx else {})}, 1_000_000 * number, **{**changes, "pass_": pass_}
        )
        for number, (pass_, (flash, mlx)) in enumerate(times.items(), 1)
    ]


def test_passes_share_an_entry():
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


def test_page_of_several_passes():
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


def test_page_of_a_decode_step():
    page = kernel_results.render([timed_entry("flash", 0.01, query_len=1, seq_len=32)])
    titles, row = map(cells, page.splitlines()[2:])
    assert titles[6:8] == ["K/V GB/s", "of reads"]
    gbs = 2 * 2 * 32 * 64 * 4 / 1e-5 / 1e9
    assert row[6:8] == [f"{gbs:.1f}", f"{gbs / GBS:.0%}"]


def test_on_a_gpu_there_are_no_bounds(run_kernels, monkeypatch):
    gpu = SimpleNamespace(default_device=lambda: "gpu", gpu="gpu", synchronize=lambda: None)
    monkeypatch.setattr(contest, "mx", gpu)
    entries, page = run_kernels("--impl", "flash")
    assert entries[0]["roofline"] == {"peak(TFLOPs/s)": None, "read(GB/s)": None}
    assert "%" not in page
    assert "peak 1" not in page


def test_without_flash_there_is_nothing_to_be_faster_than(run_kernels):
    entries, page = run_kernels("--impl", "mlx,naive", "--seq-len", "16,32")
    assert len(entries) == 4
    assert not re.search("faster|slower|no clear|against", page)


def test_csv_has_a_row_for_each_trial(run_kernels, tmp_path):
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


def test_every_shape_dtype_and_length(run_kernels):
    entries, page = run_kernels(
        *("--shape", "4/2x8,2/1x16", "--dtype", "float32,float16", "--seq-len", "16, 32", "--impl", "flash,mlx")
    )
    found = [[entry["config"][key] for key in ("head_dim", "dtype", "seq_len", "query_len")] for entry in entries[::2]]
    assert found == [
        [dim, dtype, keys, keys] for dim in (8, 16) for dtype in ("float32", "float16") for keys in (16, 32)
    ]
    contests = kernel_results.by_workload(entries)
    assert len(contests) == 8
    ratios = [each["mlx"]["forward"]["time(s)"] / each["flash"]["forward"]["time(s)"] for each in contests]
    mean, low, high = statistics.geometric_mean(ratios), min(ratios), max(ratios)
    closing = f"flash against mlx: {mean:,.2f}x ({low:,.2f}x–{high:,.2f}x over 8 shapes"
    assert page.splitlines()[-1].startswith(closing)


def test_quick_changes_defaults_and_nothing_that_is_given(invoke, tmp_path):
    out = tmp_path / "out.json"
    arguments = ("kernels", "--quick", "--shape", "2/1x8", "--impl", "flash", "--json", out)
    for more, lengths, trials in (([], [128, 512], 3), (["--seq-len", 16, "-r", 2], [16], 2)):
        assert invoke(*arguments, *more).exit_code == 0
        entries = json.loads(out.read_text())
        assert [entry["config"]["seq_len"] for entry in entries] == lengths
        assert {len(entry["forward"]["trials(s)"]) for entry in entries} == {trials}
        assert {entry["settings"]["max_seconds"] for entry in entries} == {2}


WARM_UP = 2  # calls of each implementation and configuration


@pytest.fixture
def interrupted(invoke, fake_implementation, tmp_path):
    """A run of flash and naive that gets a SIGINT in that call of naive: its entries and its page."""

    def run(number, *arguments):
        calls = []

        def before():
            calls.append(None)
            if len(calls) == number:
                signal.raise_signal(signal.SIGINT)

        fake_implementation("naive", before=before)
        options = ("--shape", "2/1x8", "--impl", "flash,naive", "-r", 2, "--json", tmp_path / "out.json")
        page = invoke("kernels", *options, *arguments)
        assert (page.exit_code, page.stderr) == (130, "")
        assert page.stdout.endswith("Interrupted; the figures are of the trials that were finished.\n")
        entries = json.loads((tmp_path / "out.json").read_text())
        assert all(entry["settings"]["interrupted"] for entry in entries)
        return entries, page.stdout

    return run


@pytest.mark.parametrize(
    ("trial", "kept"),
    [
        (1, [(32, "flash", 1)]),
        (2, [(32, "flash", 1), (32, "naive", 1)]),  # in the second round flash comes after it
    ],
)
def test_ctrl_c_keeps_what_is_finished(interrupted, trial, kept):
    """In that trial of naive, of the second of three lengths."""
    entries, page = interrupted(WARM_UP + 2 + WARM_UP + trial, "--seq-len", "16,32,48")
    trials = [
        (entry["config"]["seq_len"], entry["config"]["impl"], len(entry["forward"]["trials(s)"])) for entry in entries
    ]
    assert trials == [(16, "flash", 2), (16, "naive", 2), *kept]
    assert ("flash against naive" in page) is (len(kept) == 2)  # a single ratio needs no mean


def test_ctrl_c_between_two_passes(interrupted):
    entries, page = interrupted(WARM_UP + 2 + WARM_UP, "--seq-len", 16, "--pass", "forward_backward,backward")
    assert [entry["backward"] for entry in entries] == [{}, {}]
    assert [len(entry["forward_backward"]["trials(s)"]) for entry in entries] == [2, 2]
    assert page.startswith("attention forward_backward, ")


def test_ctrl_c_before_anything_is_measured(invoke, fake_implementation):
    fake_implementation("naive", before=lambda: signal.raise_signal(signal.SIGINT))
    page = invoke("kernels", "--shape", "2/1x8", "--seq-len", 16, "--impl", "flash,naive")
    assert (page.exit_code, page.stdout) == (130, "")
    assert page.stderr == "Interrupted: nothing was measured.\n"


def test_more_queries_than_keys_where_all_see_all(run_kernels):
    assert run_kernels("--query-len", 40, "--no-causal", "--impl", "flash,naive")


def test_quantised_beside_plain(run_kernels):
    entries, page = run_kernels("--shape", "4/2x64", "--kv-bits", "none,8", "--impl", "flash,mlx,naive")
    found = [(entry["config"]["kv_bits"], entry["config"]["impl"]) for entry in entries]
    assert found == [(None, "flash"), (None, "mlx"), (None, "naive"), (8, "flash"), (8, "mlx")]
    assert "float32, 8-bit K/V" in page
