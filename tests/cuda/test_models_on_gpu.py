"""mlx-lm's models on a GPU have the same logits with and without the patch, and CUDA kernels run all attention."""

from collections import Counter

import mlx.core as mx
import mlxlm_flash_patch as flash
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from tests.patch import arms
from tests.patch.arms import batch_caches, close, off_and_on
from tests.patch.model_configs import config, random_model

pytestmark = pytest.mark.usefixtures("requires_gpu", "uncompiled")

PROMPT, STEPS, PADDING = 100, 4, [0, 17, 70]
# In this order, the models have grouped heads; normalised queries and keys; soft-cap; windows; windows and sinks;
# latent attention (values with another head_dim). All experts are chosen, so that rounding cannot change the choice.
FAMILIES = {
    "qwen2": {"hidden_size": 512},
    "qwen3": {"head_dim": 80},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 40},
    "gpt_oss": {"head_dim": 64, "sliding_window": 40, "num_experts_per_tok": 4},
    "deepseek_v3": {"num_experts_per_tok": 4},
}
gather_mm = mx.gather_mm  # MLX's function, which unsorted_experts() replaces


@pytest.fixture(autouse=True)
def unsorted_experts(monkeypatch):
    """Turns off MLX's code for sorted experts, which sometimes reads wrong rows, with and without the patch.

    It reads wrong rows if an array has an axis of length one with stride 1. expand_dims() gives the biases of experts
    such an axis. MLX may write the sum of an output and its bias into the bias's memory, with the bias's strides.
    """
    monkeypatch.setattr(mx, "gather_mm", lambda *args, sorted_indices, **options: gather_mm(*args, **options))


def small(family, dtype=mx.float32, **changes):
    return random_model(family, {**config(family), **FAMILIES[family], **changes}, dtype)


def tokens(batch=1):
    return mx.random.randint(0, 97, (batch, PROMPT + STEPS), key=mx.random.key(0))


def logits(model, x, caches):
    return arms.logits(model, x, caches, PROMPT, *[1] * STEPS)


def assert_kernels_ran(prefill="cuda_prefill"):
    """The kernel `prefill` must have run all attention of the prompt, and cuda_decode all attention of the steps."""
    calls = Counter(flash.status().calls)
    assert calls == {prefill: calls[prefill], "cuda_decode": STEPS * calls[prefill]}
    assert calls[prefill] > 0


def differences(on, off, off_again):
    """A message that names the tokens whose logits differ. It also compares the unpatched model's two results."""
    near = np.array(mx.abs(on - off).max(axis=(0, 2)) < 1e-4 * mx.abs(off).max())  # False for NaN
    again = f"off is what it is again: {close(off_again, off)}, and close to on: {close(on, off_again)}"
    return f"tokens {np.flatnonzero(~near).tolist()}; {again}"


@pytest.mark.parametrize("family", FAMILIES)
def test_float32(family):
    model, x = small(family), tokens()
    off, on = off_and_on(lambda: logits(model, x, make_prompt_cache(model)))
    assert close(on, off), differences(on, off, logits(model, x, make_prompt_cache(model)))
    assert_kernels_ran()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_16_bits(family, dtype):
    """The error of the logits may be 10% larger with the patch than without. The exact logits are those in float32."""
    model, x = small(family, dtype), tokens()
    off, on = off_and_on(lambda: logits(model, x, make_prompt_cache(model)))
    assert_kernels_ran()
    model.set_dtype(mx.float32)
    exact = logits(model, x, make_prompt_cache(model))
    assert mx.linalg.norm(on - exact) <= 1.1 * mx.linalg.norm(off - exact)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt_oss"])
def test_left_padded_batches(family):
    """Logits at the padding itself mean nothing, and are not compared."""
    model, x = small(family), tokens(len(PADDING))
    for off, on, padding in zip(
        *off_and_on(lambda: logits(model, x, batch_caches(model, PADDING))), PADDING, strict=True
    ):
        assert close(on[padding:], off[padding:])
    assert_kernels_ran()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_cache(monkeypatch, bits, dtype):
    """The model has one layer, so its keys do not depend on attention. The patch cannot change them.

    mlx-lm's own attention fails on CUDA, so it runs on the CPU here. There it must compute in float32, because MLX's
    CPU backend adds bfloat16 products in bfloat16, which is too inexact.
    """
    own = base.quantized_scaled_dot_product_attention

    def on_cpu(queries, *stored, **options):
        exact = [(words, scales.astype(mx.float32), biases.astype(mx.float32)) for words, scales, biases in stored]
        with mx.stream(mx.cpu):
            return own(queries.astype(mx.float32), *exact, **options).astype(queries.dtype)

    model, x = small("qwen2", dtype, num_hidden_layers=1), tokens()
    with monkeypatch.context() as before:
        before.setattr(base, own.__name__, on_cpu)
        off = logits(model, x, [QuantizedKVCache(64, bits)])
    with flash.enabled(strict=True):
        on = logits(model, x, [QuantizedKVCache(64, bits)])
    if dtype == mx.float32:
        assert close(on, off)
    else:
        assert mx.linalg.norm(on - off) <= 0.01 * mx.linalg.norm(off)
    assert_kernels_ran(prefill="cuda_rowwise" if dtype == mx.float32 else "cuda_prefill")
