"""The same work without the patch and with it, and how far apart the results are."""

import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, RotatingKVCache, make_prompt_cache

# A program that calls attention, and one that does so in a thread which outlives the main one.
ATTEND = """
import mlx.core as mx
from mlx_lm.models.qwen2 import scaled_dot_product_attention
q = mx.ones((1, 2, 12, 8))
mx.eval(scaled_dot_product_attention(q, q, q, cache=None, scale=1.0, mask="causal"))
"""
LATER = f"import mlx_lm.models.qwen2, threading\nthreading.Timer(0.3, exec, [{ATTEND!r}, {{}}]).start()"


def normal(seed, *shape, dtype=mx.float32):
    """The same random numbers for a seed."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def batch_caches(model, padding, max_size=None):
    """The model's own kinds of cache, for a batch; the rotating ones of the model's size, or of the one given."""
    return [
        BatchRotatingKVCache(cache.max_size, padding) if isinstance(cache, RotatingKVCache) else BatchKVCache(padding)
        for cache in make_prompt_cache(model, max_size)
    ]


def off_and_on(run):
    """What `run` gives without the patch, and with it. None of its calls may fall back."""
    off = run()
    mx.eval(off)
    with flash.enabled(strict=True):
        on = run()
        mx.eval(on)
    assert flash.status().fallbacks == {}
    return off, on


def error(one, other):
    """The largest difference, of the largest number. Models that hide tokens have -inf there in both."""
    hidden = other == -mx.inf
    assert mx.array_equal(one == -mx.inf, hidden)
    one, other = (mx.where(hidden, 0, x).astype(mx.float32) for x in (one, other))
    return (mx.abs(one - other).max() / mx.abs(other).max()).item()


def close(one, other):
    return error(one, other) < 1e-4


def is_in():
    """Whether the patch's function stands in MLX's place."""
    return "mx.fast.scaled_dot_product_attention" in flash.status().patched


def calls():
    """How often a kernel of flash attention has run since counting began."""
    return sum(flash.status().calls.values())


def calls_of(run):
    """How often one runs in this work."""
    before = calls()
    mx.eval(run())
    return calls() - before


def peak_beyond(run):
    """The most memory, in bytes, that arrays of this work took at any moment, beyond what was there before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(run())
    return mx.get_peak_memory() - before
