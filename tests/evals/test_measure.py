"""With the patch off, mlx-lm is unchanged. With the patch on, flash attention runs. Trials measure only their work."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch
import numpy as np
import pytest
from flash_evals.results.arms import Flash
from flash_evals.work import machine, measure
from flash_evals.work.measure import run
from flashattn_core import _ext
from mlx_lm.models import base, qwen2
from mlxlm_flash_patch import patch

from tests.evals.trial_peaks import MB, nine_peaks
from tests.promises import promise

LINUX = pytest.mark.skipif(
    "process" not in measure.memory_method(),
    reason="this system does not tell the memory of a process: run it on Linux",
)


def forward(loaded, tokens=16):
    logits = loaded.model(mx.arange(tokens)[None])
    mx.eval(logits)
    return logits


@promise("the arm off is unmodified mlx-lm")
def test_the_off_arm_is_mlx_lm_as_it_is(loaded):
    def work():
        assert qwen2.scaled_dot_product_attention is base.scaled_dot_product_attention
        forward(loaded)

    flash = Flash()
    run("off", work, 16, flash)
    assert flash == Flash()


@promise("the arm on runs flash attention")
def test_the_on_arm_is_flash_and_ends_with_the_trial(loaded):
    original = qwen2.scaled_dot_product_attention
    flash = Flash()
    for tokens in (16, 1):
        run("on", partial(forward, loaded, tokens), tokens, flash)
    layers = loaded.config["num_hidden_layers"]
    assert flash.calls == {"cpu_prefill": layers, "cpu_decode": layers}
    assert not flash.fallbacks
    with pytest.raises(ZeroDivisionError):
        run("on", lambda: 1 // 0, 1, flash)
    assert qwen2.scaled_dot_product_attention is original


@promise("--precision applies to the arm with the patch on")
@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize("precision", ["float32", "input", None])
@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune"])
def test_the_precision_reaches_the_patch_and_the_settings(run_command, small_run, asked, command, precision):
    result = run_command(*small_run(command), *(["--precision", precision] if precision else []))
    assert {got for _, got in asked} == {precision or "input"}
    assert result["settings"]["precision"] == (precision or "input")


def test_calls_that_are_left_to_mlx_are_counted_apart_from_fallbacks(loaded, monkeypatch):
    counts = [3]

    def quick(query, key, value, scale, described, sinks, rounds, mlx_attention, mask, *storage):
        counts[0] += 1
        return mlx_attention(query, key, value, scale=scale, mask=mask)

    monkeypatch.setattr(_ext, "quick", quick)
    monkeypatch.setattr(_ext, "reset_left_calls", lambda: None)
    monkeypatch.setattr(_ext, "left_calls", lambda: {"a prompt": counts[0]})
    monkeypatch.setattr(patch, "_why_left", str)
    calls = {"cpu_prefill": 1000, "cpu_decode": 5}
    flash = Flash(calls, left={"a step": 1000})
    run("on", partial(forward, loaded), 16, flash)
    layers = loaded.config["num_hidden_layers"]
    assert flash == Flash(calls, left={"a step": 1000, "a prompt": layers})
    left = f"left to MLX's own attention: {1000 + layers:,} calls"
    assert str(flash) == f"cpu_decode 5 calls, cpu_prefill 1,000 calls, 0 fallbacks, {left}"


def test_attention_s_share_of_the_time(monkeypatch):
    """Attention's time starts when its inputs have been evaluated, and ends when its output has been evaluated. A fake
    clock advances by a fixed number of seconds in each function of this test.
    """
    now, evaluated = [0.0], []
    q, k, v = (mx.zeros((1, 2, 3, 8)) for _ in range(3))
    mask, output = mx.zeros((3, 3)), mx.zeros((1, 2, 3, 8))

    def go(seconds, result=None):
        now[0] += seconds
        return result

    def evaluate(*arrays):
        evaluated.append(arrays)
        go(10 if arrays == (output,) else 1)

    def work():
        go(14)
        mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)

    monkeypatch.setattr(mx, "eval", evaluate)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda *_, **__: go(5, output))
    share = measure.attention_share("off", work)
    [[inputs], _] = evaluated
    assert all(any(each is array for each in inputs) for array in (q, k, v))
    assert not any(each is mask for each in inputs)  # not evaluated, because flash attention may ignore the mask
    assert share == (5 + 10) / (14 + 1 + 5 + 10)
    assert measure.attention_share("off", lambda: go(1)) is None  # this work calls no attention


@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune"])
def test_a_process_that_is_patched_already_has_no_off_arm(refused, small_run, command):
    """In a patched process, both arms would run flash attention, and agree exactly. So the command refuses to run."""
    with mlxlm_flash_patch.enabled():
        line = refused(*small_run(command))
    assert "start flash-eval without `mlxlm-flash run`" in line


# The memory of a process varies by a megabyte or two, because of other threads. MLX's allocator counts only arrays.
@pytest.mark.rotate(1, default=5)
@pytest.mark.parametrize(
    ("method", "allocate", "megabytes", "tolerance"),
    [
        *(("process", "mlx", megabytes, 3) for megabytes in (32, 128)),
        pytest.param("process", "numpy", 16, 3, marks=LINUX),
        *(("allocator", "mlx", megabytes, 0.02) for megabytes in (2, 128)),
    ],
)
def test_peak_memory_is_what_the_work_needed(method, allocate, megabytes, tolerance):
    """Later trials reuse memory that earlier trials have freed. Their peaks must be right, too.

    The trials run in a new process. In the tests' process, the C library keeps freed memory, because other tests have
    started threads and have made allocations fail.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh_process:
        peaks = fresh_process.submit(nine_peaks, method, allocate, megabytes).result()
    assert peaks == pytest.approx([megabytes] * 9, abs=tolerance)


@promise("the flash arm's memory includes its threads' scratch")
@pytest.mark.slow("2 seconds")
@pytest.mark.parametrize("method", [pytest.param("process", marks=LINUX), "allocator"])
def test_flash_pays_for_its_scratch_whatever_ran_before(method, monkeypatch):
    """A trial's peak includes the scratch memory that flash attention's threads keep, although MLX's allocator does not
    see it. The peak does not include scratch memory of an earlier, larger call.
    """
    if method == "allocator":
        monkeypatch.setattr(measure, "memory_method", lambda: "peak of MLX's allocator")
    kept = [np.empty(0, np.uint8)]

    def work(megabytes):
        if kept[0].size < megabytes * MB:
            kept[0] = np.ones(megabytes * MB, np.uint8)

    def release():
        size, kept[0] = kept[0].size, np.empty(0, np.uint8)
        return size

    monkeypatch.setattr(flashattn_core, "release_scratch", release)
    for megabytes in (64, 64, 40, 64, 40):  # above 32 MB, the C library returns freed memory at once
        _, took = run("on", partial(work, megabytes), 0, Flash())
        assert took.peak_memory_mb == pytest.approx(megabytes, abs=3)


def test_the_machine():
    """describe() names the versions and the device that figures depend on. bandwidth() returns bytes per second, and
    products() returns FLOP/s.
    """
    described = machine.describe()
    assert described.versions.keys() == {"mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals"}
    kind, backend = described.device.split(", ", maxsplit=1)
    assert backend == flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]
    assert 1e8 < machine.free_memory() < 1e14  # bytes
    assert all(1e7 < speed < 1e14 for speed in (machine.bandwidth(), machine.products("float32")))
