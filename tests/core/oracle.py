"""Compares attention with float64, by the rule of FlashAttention's own tests.

The error against float64 may be at most twice the error of the unfused formula in the same dtype, plus 1e-5. The
unfused formula is written with MLX's plain operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np
from flashattn_core import flash_attention
from flashattn_core.reference import reference_attention, visible_and_bias

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def to_numpy(a: mx.array) -> np.ndarray:
    return np.asarray(a.astype(mx.float32))


def draw(
    rng: np.random.Generator,
    *,
    batch: tuple[int, ...] = (1,),
    heads: int = 2,
    kv_heads: int = 2,
    length: int,
    key_len: int,
    dim: int = 16,
    value_dim: int | None = None,
    dtype: str = "float32",
) -> tuple[mx.array, mx.array, mx.array]:
    """Random query, key and value."""
    shapes = (
        (*batch, heads, length, dim),
        (*batch, kv_heads, key_len, dim),
        (*batch, kv_heads, key_len, value_dim or dim),
    )
    q, k, v = (mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(DTYPES[dtype]) for shape in shapes)
    return q, k, v


def unfused(query, key, value, scale=None, mask=None, *, softcap=None, sinks=None, alibi_slopes=None):
    """Returns (out, lse) by the unfused formula, each step in query's dtype. Rows that see nothing get 0 and -inf."""
    dtype = query.dtype
    group = query.shape[-3] // key.shape[-3]
    key, value = mx.repeat(key, group, axis=-3), mx.repeat(value, group, axis=-3)
    length, key_len = query.shape[-2], key.shape[-2]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    visible, bias = visible_and_bias(query.shape, key_len, mask)
    scores = (query * mx.array(scale, dtype)) @ key.swapaxes(-1, -2)
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        distance = mx.abs(mx.arange(length)[:, None] + key_len - length - mx.arange(key_len)[None])
        scores = scores - (alibi_slopes[:, None, None] * distance).astype(dtype)
    scores = mx.where(mx.array(visible), scores + mx.array(bias).astype(dtype), -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(dtype)[:, None, None], (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    lse = mx.logsumexp(scores.astype(mx.float32), axis=-1)
    sees_any = mx.array(visible.any(axis=-1))
    out = mx.where(sees_any[..., None], weights[..., :key_len] @ value, 0)
    return out, mx.where(sees_any, lse, -mx.inf)


def assert_matches_reference(
    query, key, value, scale=None, mask=None, *, kernel="auto", attention=None, schedule=None, **options
) -> None:
    """Asserts that out and lse of `attention` obey the rule of this file. By default `attention` is flash_attention.

    schedule: an argument for an `attention` that runs GPU kernels in an emulator.
    """
    how = {} if schedule is None else {"schedule": schedule}
    attention = attention or flash_attention
    out, lse = attention(query, key, value, scale, mask, kernel=kernel, return_lse=True, **how, **options)
    assert out.dtype == query.dtype
    assert lse.dtype == mx.float32
    assert out.shape == (*query.shape[:-1], value.shape[-1])
    assert lse.shape == query.shape[:-1]
    numpy_options = {k: to_numpy(v) if isinstance(v, mx.array) else v for k, v in options.items()}
    expected_out, expected_lse = reference_attention(
        to_numpy(query), to_numpy(key), to_numpy(value), scale, mask, **numpy_options
    )
    by_unfused = functools.cache(lambda: unfused(query, key, value, scale, mask, **options))
    assert_within_rule(to_numpy(out), expected_out, [lambda: to_numpy(by_unfused()[0])], "out")
    assert_within_rule(np.asarray(lse), expected_lse, [lambda: np.asarray(by_unfused()[1])], "lse")


def assert_same_bits(got: mx.array, expected: mx.array) -> None:
    """`got` must equal `expected` rounded to got's dtype. kernel_rules.py allows some GPU kernels to differ more."""
    bits = mx.uint32 if got.dtype == mx.float32 else mx.uint16
    assert mx.array_equal(got.view(bits), expected.astype(got.dtype).view(bits))


def assert_same_but_for_order(got: mx.array, expected: mx.array) -> None:
    """The arrays may differ by the rounding of sums. kernel_rules.py allows some GPU kernels to differ more."""
    np.testing.assert_allclose(to_numpy(got), to_numpy(expected), rtol=1e-5, atol=1e-6)


def assert_within_rule(
    got: np.ndarray, expected: np.ndarray, by_unfused: Iterable[Callable[[], np.ndarray]], what: str
) -> None:
    """The error of `got` may be at most 1e-5 plus twice the largest error among the results of `by_unfused`."""
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite], err_msg=what)  # lse may be -inf
    error = np.abs(got[finite] - expected[finite]).max(initial=0)
    allowed = 1e-5
    for unfused in by_unfused:
        if error <= allowed:  # skips the unfused formula, which is slow
            return
        allowed = max(allowed, 2 * np.abs(unfused()[finite] - expected[finite]).max() + 1e-5)
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def roundings(got: mx.array, exact: np.ndarray) -> float:
    """The root mean square error of `got`, divided by that of the exact result rounded to the same dtype."""
    rounded = to_numpy(mx.array(exact.astype(np.float32)).astype(got.dtype))
    return float(np.sqrt(np.mean((to_numpy(got) - exact) ** 2) / np.mean((rounded - exact) ** 2)))


def packs_one_bit() -> bool:
    """Whether mx.quantize() supports one bit. Releases of MLX before 0.32.4 do not."""
    try:
        mx.quantize(mx.zeros((1, 32)), 32, 1)
    except ValueError:
        return False
    return True
