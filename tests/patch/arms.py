"""Helpers that run the same work without the patch and with it, and compare the results."""

import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

# Source texts of programs. ATTEND calls attention. LATER calls it in a thread that ends after the main thread.
ATTEND = """
import mlx.core as mx
from mlx_lm.models.qwen2 import scaled_dot_product_attention
q = mx.ones((1, 2, 12, 8))
mx.eval(scaled_dot_product_attention(q, q, q, cache=None, scale=1.0, mask="causal"))
"""
LATER = f"import mlx_lm.models.qwen2, threading\nthreading.Timer(0.3, exec, [{ATTEND!r}, {{}}]).start()"


def normal(seed, *shape, dtype=mx.float32):
    """Normally distributed random numbers, always the same for a seed."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def batch_caches(model, padding, max_size=None):
    """The batched counterparts of the caches that make_prompt_cache() makes for the model."""
    return [
        BatchRotatingKVCache(cache.max_size, padding) if isinstance(cache, RotatingKVCache) else BatchKVCache(padding)
        for cache in make_prompt_cache(model, max_size)
    ]


def leaves(caches):
    """The caches, and those inside of CacheLists."""
    for cache in caches:
        yield from leaves(cache.caches) if isinstance(cache, CacheList) else [cache]


def logits(model, tokens, caches, *lengths):
    """The logits of the tokens, computed in calls of these lengths. Like llama4, trims chunked caches after a call."""
    out = []
    for length in lengths:
        out.append(model(tokens[:, :length], cache=caches))
        tokens = tokens[:, length:]
        mx.eval(out, [cache.state for cache in caches])
        for cache in caches:
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
    return mx.concatenate(out, axis=1)


def off_and_on(run):
    """The results of run() without the patch and with it. No call may fall back."""
    off = run()
    mx.eval(off)
    with flash.enabled(strict=True):
        on = run()
        mx.eval(on)
    assert flash.status().fallbacks == {}
    return off, on


def error(one, other):
    """The largest difference, relative to the largest number of `other`. Both must have -inf in the same places."""
    hidden = other == -mx.inf
    assert mx.array_equal(one == -mx.inf, hidden)
    one, other = (mx.where(hidden, 0, x).astype(mx.float32) for x in (one, other))
    return (mx.abs(one - other).max() / mx.abs(other).max()).item()


def close(one, other):
    return error(one, other) < 1e-4


def is_in():
    """Whether the patch has replaced MLX's function."""
    return "mx.fast.scaled_dot_product_attention" in flash.status().patched


def calls():
    """How many flash attention kernels have run since the patch was last switched on."""
    return sum(flash.status().calls.values())


def calls_of(run):
    """How many flash attention kernels run() runs."""
    before = calls()
    mx.eval(run())
    return calls() - before
