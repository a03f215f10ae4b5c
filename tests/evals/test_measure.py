"""The two arms: off is mlx-lm as it is, on really is flash, and time and memory are those of the work alone."""

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlxlm_flash_patch
import numpy as np
import pytest
from flash_evals import measure
from flash_evals.errors import EvalError
from flash_evals.measure import Flash, arms, run
from flash_evals.models import LoadedModel
from mlx_lm.models import base, qwen2
from mlxlm_flash_patch import route

MB = 1_000_000


def forward(loaded: LoadedModel, tokens: int = 16) -> mx.array:
    logits = loaded.model(mx.arange(tokens)[None])
    mx.eval(logits)
    return logits


def test_who_goes_first_takes_turns() -> None:
    assert [arms(trial) for trial in range(3)] == [("off", "on"), ("on", "off"), ("off", "on")]


def test_the_off_arm_is_mlx_lm_as_it_is(loaded: LoadedModel) -> None:
    seen = []

    def work() -> None:
        seen.append(qwen2.scaled_dot_product_attention is base.scaled_dot_product_attention)
        forward(loaded)

    flash = Flash()
    run("off", work, flash)
    assert seen == [True]
    assert flash == Flash()


def test_the_on_arm_is_flash_and_ends_with_the_trial(loaded: LoadedModel) -> None:
    original = qwen2.scaled_dot_product_attention
    flash = Flash()
    for tokens in (16, 1):
        run("on", partial(forward, loaded, tokens), flash)
    layers = loaded.config["num_hidden_layers"]
    assert flash.calls == {"cpu_prefill": layers, "cpu_decode": layers}
    assert not flash.fallbacks
    assert qwen2.scaled_dot_product_attention is original


def test_fallbacks_are_counted_and_not_warned_about(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every head_dim."""
    monkeypatch.setattr(route, "MAX_HEAD_DIM", 0)
    flash = Flash()
    run("on", partial(forward, loaded), flash)
    assert not flash.calls
    assert list(flash.fallbacks.values()) == [loaded.config["num_hidden_layers"]]
    assert str(flash).startswith("flash: no calls, 2 fallbacks (")


def test_a_process_that_is_patched_already_has_no_off_arm(loaded: LoadedModel) -> None:
    with mlxlm_flash_patch.enabled(), pytest.raises(EvalError, match="run flash-eval without mlxlm-flash run"):
        run("off", partial(forward, loaded), Flash())


def test_flash_counts_add_up_and_survive_a_file() -> None:
    a = Flash(Counter(cpu_prefill=1000), Counter({"a reason": 1}))
    b = Flash(Counter(cpu_prefill=234, cpu_decode=5))
    assert str(a + b) == "flash: cpu_decode 5 calls, cpu_prefill 1,234 calls, 1 fallbacks (a reason: 1)"
    assert Flash.of((a + b).describe()) == a + b


def scratch(allocate: Callable[[int], mx.array], size: int) -> None:
    """Memory that is gone again when the work is done."""
    array = allocate(size)
    mx.eval(array)


# Within bytes: MLX's allocator counts the array alone; the process's other threads may touch a megabyte or two of their
# own meanwhile.
@pytest.mark.parametrize(
    ("method", "megabytes", "tolerance"),
    [
        ("process", 32, 3 * MB),
        ("process", 128, 3 * MB),
        ("allocator", 2, 20_000),
        ("allocator", 32, 20_000),
        ("allocator", 128, 20_000),
    ],
)
def test_peak_memory_is_what_the_work_needed(
    method: str, megabytes: int, tolerance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the second time, when a free list would serve it; and beside memory that was there before."""
    if method == "allocator":
        monkeypatch.setattr(measure, "memory_method", lambda: "peak of MLX's allocator")
    held = mx.ones(10 * MB)
    mx.eval(held)
    for _ in range(2):
        _, trial = run("off", partial(scratch, partial(mx.ones, dtype=mx.uint8), megabytes * MB), Flash())
        assert trial.peak_memory == pytest.approx(megabytes * MB, abs=tolerance)


def test_memory_outside_mlx_counts_where_the_process_can_be_measured() -> None:
    """What a kernel allocates by itself: MLX's own counter does not see it."""
    expected = 32 * MB if "process" in measure.memory_method() else 0
    _, trial = run("off", partial(scratch_in_numpy, 32 * MB), Flash())
    assert trial.peak_memory == pytest.approx(expected, rel=0.1)


def scratch_in_numpy(size: int) -> None:
    np.ones(size, np.uint8)


def test_a_failing_trial_leaves_nothing_patched(loaded: LoadedModel) -> None:
    original = qwen2.scaled_dot_product_attention
    with contextlib.suppress(ZeroDivisionError):
        run("on", lambda: 1 // 0, Flash())
    assert qwen2.scaled_dot_product_attention is original
