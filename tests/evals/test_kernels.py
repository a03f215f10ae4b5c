"""Tests the options, the result file and the page of `flash-eval kernels`."""

import re
from copy import deepcopy
from unittest.mock import ANY

import flashattn_core
import mlx.core as mx
import numpy as np
import pytest
from flash_evals.pages.kernels_page import description
from flash_evals.results.kernels_result import Entry
from flash_evals.results.workload import Workload
from flash_evals.work import contest, implementations, machine
from msgspec import convert

pytestmark = pytest.mark.usefixtures("quick_machine")


def test_json(run_kernels):
    """The result file has an entry for each shape, dtype, length and implementation."""
    entries, page = run_kernels(
        *("--shape", "4/2x8,2/1x16", "--dtype", "float32,float16", "--seq-len", "16, 32", "--query-len", 16),
        *("--batch-size", 2, "--window", 9, "--seed", 3, "--impl", "naive,flash", "--pass", "forward,backward"),
        *("--max-seconds", 40),
    )
    shapes = ({"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}, {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16})
    same = {"batch_size": 2, "query_len": 16, "causal": True, "window": 9, "kv_bits": None, "device": "cpu"}
    assert [entry["config"] for entry in entries] == [
        {**shape, **same, "dtype": dtype, "seq_len": keys, "impl": impl}
        for shape in shapes
        for dtype in ("float32", "float16")
        for keys in (16, 32)
        for impl in ("flash", "naive")
    ]
    for entry in entries:
        work = convert(entry["config"], Workload)
        for pass_ in ("forward", "backward"):
            figures, trials = entry[pass_], entry[pass_]["trials(s)"]
            quantiles = [figures[key] for key in ("time_p20(s)", "time(s)", "time_p80(s)")]
            assert quantiles == pytest.approx(np.quantile(trials, [0.2, 0.5, 0.8]))
            assert (len(trials), figures["calls_per_trial"]) == (3, 1)
            assert figures["FLOPS(TFLOPs/s)"] == pytest.approx(work.flops(pass_) / quantiles[1] / 1e12)
            read = work.bytes_read / quantiles[1] / 1e9 if pass_ == "forward" else None
            assert figures.get("read(GB/s)") == pytest.approx(read)
            assert figures["inputs_and_outputs(MB)"] == work.bytes_held(pass_) / 1e6
        for key in ("peak_memory_usage(MB)", "inputs_and_outputs(MB)"):
            assert entry[key] == max(entry["forward"][key], entry["backward"][key])
        assert entry["forward_backward"] == {}
        assert entry["roofline"] == {"peak(TFLOPs/s)": 0.1, "read(GB/s)": 10}
        given = {"repetitions": 3, "max_seconds": 40, "seed": 3, "interrupted": False, "precision": "float32"}
        assert entry["settings"] == {**given, "memory": ANY}
        assert set(entry["machine"]["versions"]) == set(machine.PACKAGES)
    assert re.search(r"flash against naive, backward: [\d.,]+x as fast \(.* over 8 shapes.*\)$", page)


def page_of(entries):
    """The page's header, the cells of its table, and the lines below the table."""
    header, _, *lines = description(convert(entries, list[Entry])).text().splitlines()
    table, _, closing = "\n".join(lines).partition("\n\n")
    return header, [re.split(" {3,}", line.strip()) for line in table.splitlines()], closing.splitlines()


def test_page(results):
    """A row does not repeat the problem or pass of the row above it. A decode step has GB/s, not FLOP/s."""
    entries = deepcopy(results["kernels"])
    for number, (entry, seconds) in enumerate(zip(entries, (1e-4, 1e-3, 2e-4, 1.6e-4), strict=True)):
        entry["machine"]["device"] = "cpu, AVX2, 2 threads"
        entry["roofline"] = {"peak(TFLOPs/s)": 0.1, "read(GB/s)": 10}
        for place, pass_ in enumerate(("forward", "backward"), 2 * number):
            entry[pass_] |= {"time(s)": seconds, "trials(s)": [seconds] * 3, "FLOPS(TFLOPs/s)": (10 + place) / 1000}
            entry[pass_] |= {"peak_memory_usage(MB)": 2.5 + place, "read(GB/s)": 1 + place}
    header, rows, closing = page_of(entries)
    assert header == "attention, causal, batch size 1 · cpu, AVX2, 2 threads · peak 100 GFLOP/s, reads 10 GB/s"
    names = ["shape", "dtype", "queries", "keys", "pass", "impl", "time"]
    assert rows[:3] == [
        [*names, "GFLOP/s", "of peak", "flash is", "memory", "trials"],
        ["4/2x8", "float32", "32", "32", "forward", "flash", "100 µs (100–100)", "10.0", "10%", "2.5 MB", "3"],
        ["mlx", "1.00 ms (1.00–1.00)", "12.0", "12%", "10.00x faster", "4.5 MB", "3"],
    ]
    assert rows[7:] == [
        ["backward", "flash", "200 µs (200–200)", "15.0", "15%", "7.5 MB", "3"],
        ["mlx", "160 µs (160–160)", "17.0", "17%", "1.25x slower", "9.5 MB", "3"],
    ]
    assert closing == [
        f"flash against mlx, {x}: 2.83x as fast (0.80x–10.00x over 2 shapes)" for x in ("forward", "backward")
    ]

    decode = {**entries[0], "config": {**entries[0]["config"], "query_len": 1}, "backward": {}}
    _, rows, _ = page_of([decode])
    assert (rows[0][-5:-3], rows[1][-4:-2]) == (["K/V GB/s", "of reads"], ["1.0", "10%"])

    header, rows, closing = page_of([{**entry, "backward": {}} for entry in entries[1::2]])  # without flash
    assert header.startswith("attention forward, causal")
    assert [row[-6] for row in rows[1:]] == ["mlx"] * 2
    assert not re.search("faster|slower|no clear|against", str([rows[1:], closing]))


def test_the_bounds_of_a_gpu_are_mlx_s_own(run_kernels, monkeypatch):
    """On a GPU, the peak is the speed of MLX's matrix product in the workload's dtype, and the bandwidth is the speed
    of MLX's copy. A trial evaluates many calls at once.
    """
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setitem(machine.PRODUCT_SIZE, "gpu", 64)
    monkeypatch.setattr(machine, "COPY_BYTES", 4096)
    monkeypatch.setattr(contest, "TRIAL_SECONDS", 2e-2)
    evaluated, mlx_s = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda lot: evaluated.append(len(lot)) or mlx_s(lot))
    [entry], page = run_kernels("--impl", "flash", "--dtype", "bfloat16", "--no-causal", "--query-len", 40)
    assert max(evaluated) == entry["forward"]["calls_per_trial"] // implementations.EVALUATIONS > 1
    assert entry["config"]["device"] == "gpu"
    assert 0 < entry["roofline"]["peak(TFLOPs/s)"] != 0.1
    assert 0 < entry["roofline"]["read(GB/s)"] != 10
    assert re.search(r"peak [\d–]+ GFLOP/s, reads [\d–]+ GB/s\n", page)


@pytest.mark.parametrize(("strict", "limit"), [("0", "1e-04"), ("1", "2e-03")])
def test_mlx_rounds_float32_to_tf32_with_cuda(refused, fake_implementation, monkeypatch, strict, limit):
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flashattn_core, "backends", lambda: {"cuda": "NVIDIA H100"})
    monkeypatch.setenv("MLX_ENABLE_TF32", strict)
    fake_implementation("naive", output=lambda array: 2 * array)
    line = refused("kernels", "--shape", "4/2x8", "--seq-len", 32, "--impl", "flash,naive")
    assert f"expected at most {limit}" in line
    assert machine.device() == "gpu, NVIDIA H100" + (", TF32" if strict == "1" else "")


def test_quantised_beside_plain(run_kernels):
    entries, page = run_kernels("--shape", "4/2x64", "--kv-bits", "none,8", "--impl", "flash,mlx,naive")
    found = [(entry["config"]["kv_bits"], entry["config"]["impl"]) for entry in entries]
    assert found == [(None, "flash"), (None, "mlx"), (None, "naive"), (8, "flash"), (8, "mlx")]
    assert "float32, 8-bit K/V" in page


@pytest.mark.parametrize("kv_bits", ["none", "8"])
@pytest.mark.parametrize("precision", ["input", "float32", None])
def test_the_precision_reaches_flash_and_the_settings(run_kernels, asked, precision, kv_bits):
    how = ["--shape", "4/2x64", "--impl", "flash", "--kv-bits", kv_bits]
    [entry], _ = run_kernels(*how, *(["--precision", precision] if precision else []))
    assert {got for _, got in asked} == {precision or "float32"}
    assert entry["settings"]["precision"] == (precision or "float32")
