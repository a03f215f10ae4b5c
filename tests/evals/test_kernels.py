"""`flash-eval kernels`: what it makes of its options, the result file and the page, and what is left after Ctrl-C."""

import csv
import json
import re
import signal
import statistics

import flashattn_core
import mlx.core as mx
import numpy as np
import pytest
from flash_evals import contest, implementations, machine
from flash_evals.page.kernels import description
from flash_evals.workload import PASSES
from kernel_cases import GBS, GFLOPS, entries_of, timed_contest, workload

pytestmark = pytest.mark.usefixtures("quick_machine")


def test_json(run_kernels):
    options = ("--batch-size", 2, "--window", 9, "--query-len", 16, "--seed", 3, "--pass", "forward,backward")
    entries, _ = run_kernels("--impl", "naive,flash", *options)
    work = workload(batch_size=2, query_len=16, window=9)
    assert [entry["config"].pop("impl") for entry in entries] == ["flash", "naive"]
    for entry in entries:
        lengths = {"batch_size": 2, "seq_len": 32, "query_len": 16, "window": 9}
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32", "kv_bits": None}
        assert entry["config"] == {**lengths, **shape, "causal": True, "device": "cpu"}
        for pass_ in ("forward", "backward"):
            figures = entry[pass_]
            trials, seconds = figures["trials(s)"], figures["time(s)"]
            assert len(trials) == 3
            assert seconds == statistics.median(trials)
            assert [figures["time_p20(s)"], figures["time_p80(s)"]] == pytest.approx(np.quantile(trials, [0.2, 0.8]))
            assert figures["FLOPS(TFLOPs/s)"] == pytest.approx(work.flops(pass_) / seconds / 1e12)
            assert figures["inputs_and_outputs(MB)"] == work.bytes_held(pass_) / 1e6
        assert entry["forward"]["read(GB/s)"] == pytest.approx(work.bytes_read / entry["forward"]["time(s)"] / 1e9)
        assert "read(GB/s)" not in entry["backward"]
        assert entry["forward_backward"] == {}
        assert entry["inputs_and_outputs(MB)"] == work.bytes_held("backward") / 1e6
        assert entry["roofline"] == pytest.approx({"peak(TFLOPs/s)": GFLOPS / 1e3, "read(GB/s)": GBS})
        settings = [entry["settings"][key] for key in ("repetitions", "max_seconds", "seed", "interrupted")]
        assert settings == [3, 30, 3, False]
        assert entry["machine"]["versions"]["mlx"]
        assert "torch" not in entry["machine"]["versions"]


def render(contests):
    """The page: its header, the cells of its table, and what comes below."""
    page = description(entries_of(contests)).text()
    header, blank, *lines = page.splitlines()
    assert blank == ""
    table, _, closing = "\n".join(lines).partition("\n\n")
    rows = [[cell.strip() for cell in line.split("   ") if cell.strip()] for line in table.splitlines()]
    return header, rows, closing.splitlines()


def test_page():
    header, rows, _ = render([timed_contest({"flash": 0.1, "mlx": 1.0, "torch": 0.08}, query_len=32)])
    assert header == "attention forward, causal, batch size 1 · cpu, AVX2, 2 threads · peak 100 GFLOP/s, reads 10 GB/s"
    gflops = 4 * 64 * 14 * (32 * 33 // 2) / 1e-4 / 1e9  # 18.9
    assert rows == [
        ["shape", "dtype", "queries", "keys", "impl", "time", "GFLOP/s", "of peak", "flash is", "memory", "trials"],
        ["14/2x64", "float32", "32", "32", "flash", "100 µs (100–100)", f"{gflops:.1f}", "19%", "2.5 MB", "3"],
        ["mlx", "1.00 ms (1.00–1.00)", f"{gflops / 10:.1f}", "1.9%", "10.00x faster", "2.5 MB", "3"],
        ["torch", "80.0 µs (80.0–80.0)", f"{gflops / 0.8:.1f}", "24%", "1.25x slower", "2.5 MB", "3"],
    ]
    _, rows, closing = render([timed_contest({"mlx": 1.0, "torch": 0.08}, query_len=32)])
    assert len(rows) == 3
    assert not re.search("faster|slower|no clear|against", str([rows[1:], closing]))  # without flash


def test_several_passes_share_an_entry_and_a_page():
    """What the rows of a problem share stands in the first, and the pass in the first of its own."""
    contests = [
        timed_contest(of_pass, 1_000_000 * number, seq_len=seq_len, pass_=PASSES[number - 1])
        for seq_len in (32, 64)
        for number, of_pass in enumerate([{"flash": 0.1, "mlx": 1}, {"flash": 0.25, "mlx": 2}, {"flash": 0.3}], 1)
    ]
    flash, mlx, *_ = entries_of(contests)
    assert (flash.config.impl, mlx.config.impl) == ("flash", "mlx")
    assert (flash.peak_memory, mlx.peak_memory) == (3, 2)  # the most of a pass
    header, rows, closing = render(contests)
    assert header.startswith("attention, causal, batch size 1 · cpu")
    assert [row[: -6 if row[0] == "mlx" else -5] for row in rows[:7]] == [
        ["shape", "dtype", "queries", "keys", "pass", "impl", "time"],
        ["14/2x64", "float32", "32", "32", "forward", "flash"],
        ["mlx"],
        ["backward", "flash"],
        ["mlx"],
        ["forward_backward", "flash"],
        ["14/2x64", "float32", "32", "64", "forward", "flash"],
    ]
    assert closing == [
        "flash against mlx, forward: 10.00x (10.00x–10.00x over 2 shapes)",
        "flash against mlx, backward: 8.00x (8.00x–8.00x over 2 shapes)",
    ]


def test_page_of_a_decode_step():
    _, (titles, row), _ = render([timed_contest({"flash": 0.01}, query_len=1)])
    assert titles[6:8] == ["K/V GB/s", "of reads"]
    gbs = 2 * 2 * 32 * 64 * 4 / 1e-5 / 1e9
    assert row[6:8] == [f"{gbs:.1f}", f"{gbs / GBS:.0%}"]


def test_the_bounds_of_a_gpu_are_mlx_s_own(run_kernels, monkeypatch):
    """A matrix product in the workload's dtype, and a copy; its short calls are evaluated many at once."""
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(machine, "PRODUCT_SIZE", 64)
    monkeypatch.setattr(machine, "COPY_BYTES", 4096)
    monkeypatch.setattr(machine, "RATE_SECONDS", 0)
    monkeypatch.setattr(contest, "TRIAL_SECONDS", 2e-2)
    evaluated, mlx_s = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda lot: evaluated.append(len(lot)) or mlx_s(lot))
    entries, page = run_kernels("--impl", "flash", "--dtype", "bfloat16", "--no-causal", "--query-len", 40)
    assert max(evaluated) == entries[0]["forward"]["calls_per_trial"] // implementations.EVALUATIONS > 1
    assert entries[0]["config"]["device"] == "gpu"
    assert 0 < entries[0]["roofline"]["peak(TFLOPs/s)"] != GFLOPS / 1e3
    assert 0 < entries[0]["roofline"]["read(GB/s)"] != GBS
    assert re.search(r"peak [\d–]+ GFLOP/s, reads [\d–]+ GB/s\n", page)


def test_no_torch_on_a_gpu(refused, monkeypatch):
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    assert "--impl torch: it is for a CPU" in refused("kernels", "--impl", "torch")


@pytest.mark.parametrize(("strict", "limit"), [("0", "1e-04"), ("1", "2e-03")])
def test_mlx_rounds_float32_to_tf32_with_cuda(refused, fake_implementation, monkeypatch, strict, limit):
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flashattn_core, "backends", lambda: {"cuda": "NVIDIA H100"})
    monkeypatch.setenv("MLX_ENABLE_TF32", strict)
    fake_implementation("naive", output=lambda array: 2 * array)
    assert f"expected at most {limit}" in refused(
        "kernels", "--shape", "4/2x8", "--seq-len", 32, "--impl", "flash,naive"
    )
    assert machine.device() == "gpu, NVIDIA H100" + (", TF32" if strict == "1" else "")


def test_every_shape_dtype_and_length(run_kernels, tmp_path):
    """And a row of --csv for each trial of each pass."""
    entries, page = run_kernels(
        *("--shape", "4/2x8,2/1x16", "--dtype", "float32,float16", "--seq-len", "16, 32", "--impl", "flash,mlx"),
        *("--pass", "forward,backward", "--csv", tmp_path / "out.csv"),
    )
    config = ("head_dim", "dtype", "seq_len", "query_len", "impl")
    found = [[entry["config"][key] for key in config] for entry in entries]
    assert found == [
        [dim, dtype, keys, keys, impl]
        for dim in (8, 16)
        for dtype in ("float32", "float16")
        for keys in (16, 32)
        for impl in ("flash", "mlx")
    ]
    ratios = [
        mlx["backward"]["time(s)"] / flash["backward"]["time(s)"]
        for flash, mlx in zip(entries[::2], entries[1::2], strict=True)
    ]
    mean, low, high = statistics.geometric_mean(ratios), min(ratios), max(ratios)
    closing = f"flash against mlx, backward: {mean:,.2f}x ({low:,.2f}x–{high:,.2f}x over 8 shapes"
    assert page.splitlines()[-1].startswith(closing)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = [[*map(row.get, (*config, "pass", "trial")), float(row["time(s)"])] for row in csv.DictReader(file)]
    assert rows == [
        [*(str(entry["config"][key]) for key in config), pass_, str(number), seconds]
        for entry in entries
        for pass_ in ("forward", "backward")
        for number, seconds in enumerate(entry[pass_]["trials(s)"])
    ]
    assert len(rows) == 16 * 2 * 3


def test_quick_changes_defaults_and_nothing_that_is_given(invoke, tmp_path):
    out = tmp_path / "out.json"
    arguments = ("kernels", "--quick", "--shape", "2/1x8", "--impl", "flash", "--json", out)
    for more, lengths, trials in (([], [128, 512], 3), (["--seq-len", 16, "-r", 2], [16], 2)):
        assert invoke(*arguments, *more).exit_code == 0
        entries = json.loads(out.read_text())
        assert [entry["config"]["seq_len"] for entry in entries] == lengths
        assert {len(entry["forward"]["trials(s)"]) for entry in entries} == {trials}
        assert {entry["settings"]["max_seconds"] for entry in entries} == {2}


WARM_UP = 2  # calls of each implementation, configuration and pass
LENGTHS, PASSES_OF_ONE = ("--seq-len", "16,32,48"), ("--seq-len", 16, "--pass", "forward_backward,backward")
FIRST = [(16, "flash", (2, 0, 0)), (16, "naive", (2, 0, 0))]


@pytest.mark.parametrize(
    ("arguments", "trial", "kept"),
    [
        (LENGTHS, 1, [*FIRST, (32, "flash", (1, 0, 0))]),
        (LENGTHS, 2, [*FIRST, (32, "flash", (1, 0, 0)), (32, "naive", (1, 0, 0))]),  # in the second round flash is last
        (PASSES_OF_ONE, 0, [(16, "flash", (0, 0, 2)), (16, "naive", (0, 0, 2))]),
    ],
)
def test_ctrl_c_keeps_what_is_finished(invoke, fake_implementation, tmp_path, arguments, trial, kept):
    """In that trial of naive, of the second length or pass."""
    calls = []

    def before():
        calls.append(None)
        if len(calls) == WARM_UP + 2 + WARM_UP + trial:
            signal.raise_signal(signal.SIGINT)

    fake_implementation("naive", before=before)
    options = ("--shape", "2/1x8", "--impl", "flash,naive", "-r", 2, "--json", tmp_path / "out.json")
    page = invoke("kernels", *options, *arguments)
    assert (page.exit_code, page.stderr) == (130, "")
    assert page.stdout.endswith("Interrupted; the figures are of the trials that were finished.\n")
    entries = json.loads((tmp_path / "out.json").read_text())
    assert all(entry["settings"]["interrupted"] for entry in entries)
    assert kept == [
        (config["seq_len"], config["impl"], tuple(len(entry[pass_].get("trials(s)", ())) for pass_ in PASSES))
        for entry in entries
        for config in [entry["config"]]
    ]
    assert ("flash against naive: " in page.stdout) is (len(kept) == 4)  # a single ratio needs no mean


def test_quantised_beside_plain(run_kernels):
    entries, page = run_kernels("--shape", "4/2x64", "--kv-bits", "none,8", "--impl", "flash,mlx,naive")
    found = [(entry["config"]["kv_bits"], entry["config"]["impl"]) for entry in entries]
    assert found == [(None, "flash"), (None, "mlx"), (None, "naive"), (8, "flash"), (8, "mlx")]
    assert "float32, 8-bit K/V" in page
