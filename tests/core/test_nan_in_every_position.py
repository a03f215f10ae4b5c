"""NaN or infinity in one element of any input reaches what depends on that element; all else keeps its bits.

What depends on it follows from who sees whom: a key that a row does not see is not in the row's sums, forward or
backward. NaN reaches everything of that. Infinity may reach less: a score of -inf is a key without weight.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention, quantized_flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
from flashattn_core.reference import visible_and_bias
from oracle import DTYPES, draw

POISONS = [np.nan, np.inf, -np.inf]
POSITIONS = 8  # of an input; all of them if it has fewer elements


@dataclass(frozen=True)
class Shape:
    length: int
    key_len: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 3
    value_dim: int = 5


# Decode and prefill; one vector, one tile, several runs and tiles and bands.
SHAPES = [
    Shape(1, 1),
    Shape(3, 5),
    Shape(8, 9),
    Shape(9, 7),
    Shape(11, 33, dim=17, value_dim=16),
    Shape(2, 1030, dim=64, value_dim=64),
    Shape(70, 330, heads=6, dim=20, value_dim=33),
]
MASKS = {
    "none": lambda rng, s: {},
    "causal": lambda rng, s: {"mask": "causal"},
    "window": lambda rng, s: {"mask": SlidingWindow(4) & KeyRange(0, max(1, s.key_len - 2))},
    "bool": lambda rng, s: {"mask": mx.array(rng.random((s.length, s.key_len)) > 0.4)},
    "everything": lambda rng, s: {
        "mask": Causal(),
        "bias": np.where(rng.random((s.heads, s.length, s.key_len)) > 0.3, 0.5, -np.inf).astype(np.float32),
        "sinks": rng.standard_normal(s.heads).astype(np.float32),
        "alibi_slopes": rng.random(s.heads).astype(np.float32),
        "softcap": 4.0,
    },
}


@dataclass(frozen=True)
class Call:
    """The arrays of one call, with the gradients of out and lse, and what is no array."""

    arrays: dict[str, np.ndarray]
    dtype: mx.Dtype
    options: dict

    def outputs(self) -> dict[str, np.ndarray]:
        """out, lse and the gradients, as bits."""
        of_dtype = ("query", "key", "value", "bias", "sinks", "dout")
        a = {k: mx.array(v).astype(self.dtype if k in of_dtype else mx.float32) for k, v in self.arrays.items()}
        dout, dlse, bias = a.pop("dout"), a.pop("dlse"), a.pop("bias", None)
        slopes, options = a.pop("alibi_slopes", None), dict(self.options)
        if bias is not None:
            options["mask"] = options["mask"] & bias

        def attention(*primals):
            named = dict(zip(a, primals, strict=True))
            return flash_attention(**named, alibi_slopes=slopes, **options, return_lse=True)

        results, gradients = mx.vjp(attention, list(a.values()), [dout, dlse])
        names = ["out", "lse", *("d" + name for name in a)]
        return {name: bits(x) for name, x in zip(names, [*results, *gradients], strict=True)}


def bits(a: mx.array) -> np.ndarray:
    return np.array(a.view(mx.uint32 if a.dtype.size == 4 else mx.uint16))


def is_nan(a: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    return np.array(mx.isnan(mx.array(a).view(mx.float32 if a.dtype == np.uint32 else dtype)))


def draw_call(rng, shape: Shape, mask: str, dtype: str) -> Call:
    s = shape
    query, key, value = draw(
        rng, heads=s.heads, kv_heads=s.kv_heads, length=s.length, key_len=s.key_len, dim=s.dim, value_dim=s.value_dim
    )
    arrays = {name: np.array(a) for name, a in zip(("query", "key", "value"), (query, key, value), strict=True)}
    options = MASKS[mask](rng, s)
    arrays |= {name: options.pop(name) for name in ("sinks", "alibi_slopes", "bias") if name in options}
    arrays["dout"] = rng.standard_normal((1, s.heads, s.length, s.value_dim)).astype(np.float32)
    arrays["dlse"] = rng.standard_normal((1, s.heads, s.length)).astype(np.float32)
    return Call(arrays, DTYPES[dtype], options)


def some_pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of two arrays of truths: whether some k has both a[i, k] and b[k, j]."""
    return (a.astype(np.float32) @ b.astype(np.float32)) > 0


def reached(visible: np.ndarray, shape: Shape, bad: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Which elements of the outputs depend on the bad ones; `visible`: (1, heads, L, S)."""
    group = shape.heads // shape.kv_heads
    none = np.zeros(1, bool)
    bad_sinks, bad_slopes = (bad.get(name, none)[:, None] for name in ("sinks", "alibi_slopes"))
    key, value = (np.repeat(bad[name], group, axis=1) for name in ("key", "value"))
    sees_any = visible.any(axis=-1)
    to_keys = visible.swapaxes(-1, -2)

    scores = bad["query"].any(axis=-1)[..., None] | key.any(axis=-1)[..., None, :] | bad.get("bias", none)
    rows = (visible & (scores | bad_slopes[..., None])).any(axis=-1) | sees_any & bad_sinks
    out = rows[..., None] | some_pair(visible, value)
    delta = sees_any & (rows | (out | bad["dout"]).any(axis=-1) | bad["dlse"])
    products = bad["dout"].any(axis=-1)[..., None] | value.any(axis=-1)[..., None, :]
    score_gradients = visible & (delta[..., None] | products)

    def of_group(a):
        return a.reshape(1, shape.kv_heads, group, *a.shape[2:]).any(axis=2)

    return {
        "out": out,
        "lse": rows,
        "dquery": score_gradients.any(axis=-1)[..., None] | some_pair(visible, key),
        "dkey": of_group(score_gradients.any(axis=-2)[..., None] | some_pair(to_keys, bad["query"])),
        "dvalue": of_group(some_pair(to_keys, rows[..., None]) | some_pair(to_keys, bad["dout"])),
        "dsinks": (rows | delta).any(axis=(0, 2)),
    }


def positions(rng, a: np.ndarray):
    for flat in rng.permutation(a.size)[:POSITIONS]:
        yield np.unravel_index(flat, a.shape)


@pytest.mark.rotate(7)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.length}x{s.key_len}")
def test_it_reaches_what_depends_on_it(rng, shape, mask, dtype):
    call = draw_call(rng, shape, mask, dtype)
    query_shape = (1, shape.heads, shape.length, shape.dim)
    whole = call.options.get("mask")
    if "bias" in call.arrays:
        whole = whole & mx.array(call.arrays["bias"])
    visible, _ = visible_and_bias(query_shape, shape.key_len, whole)
    clean = call.outputs()
    for name, array in call.arrays.items():
        for at in positions(rng, array):
            if name == "bias" and array[at] == -np.inf:
                continue  # a hidden pair that would be shown
            poison = rng.choice(POISONS[:2] if name == "bias" else POISONS)  # a bias of -inf is no fault: it hides
            spoilt = array.copy()
            spoilt[at] = poison
            got = replace(call, arrays={**call.arrays, name: spoilt}).outputs()
            bad = {k: np.zeros(v.shape, bool) for k, v in call.arrays.items()}
            bad[name][at] = True
            expected = reached(visible, shape, bad)
            for output, found in got.items():
                where = f"{poison} in {name}{[int(i) for i in at]}, seen in {output}"
                mask_of = np.broadcast_to(expected[output], found.shape)
                np.testing.assert_array_equal(found[~mask_of], clean[output][~mask_of], err_msg=where)
                if np.isnan(poison):
                    assert is_nan(found, call.dtype)[mask_of].all(), where


@pytest.mark.rotate(5)
@pytest.mark.parametrize("bits_each", [4, 8])
@pytest.mark.parametrize("name", ["key scales", "key biases", "value scales", "value biases"])
@pytest.mark.parametrize("shape", [Shape(1, 1), Shape(3, 700), Shape(20, 33)], ids=lambda s: f"{s.length}x{s.key_len}")
def test_in_the_scales_of_quantised_keys_and_values(rng, shape, name, bits_each):
    """A scale or bias of values stands for the columns of its group alone."""
    heads, dim, group_size = shape.heads, 96, 32
    query = mx.array(rng.standard_normal((1, heads, shape.length, dim), dtype=np.float32))
    packed = {
        of: list(
            mx.quantize(
                mx.array(rng.standard_normal((1, shape.kv_heads, shape.key_len, dim), dtype=np.float32)),
                group_size=group_size,
                bits=bits_each,
            )
        )
        for of in ("key", "value")
    }

    def outputs(arrays):
        out, lse = quantized_flash_attention(
            query, *map(tuple, arrays.values()), mask="causal", group_size=group_size, bits=bits_each, return_lse=True
        )
        return {"out": bits(out), "lse": bits(lse)}

    visible, _ = visible_and_bias(query.shape, shape.key_len, "causal")
    clean = outputs(packed)
    of, part = name.split()
    index = ["weights", "scales", "biases"].index(part)
    array = np.array(packed[of][index])
    for at in positions(rng, array):
        spoilt = array.copy()
        spoilt[at] = np.nan
        arrays = {**packed, of: [mx.array(spoilt) if i == index else a for i, a in enumerate(packed[of])]}
        got = outputs(arrays)
        bad = np.zeros(array.shape, bool)
        bad[at] = True
        bad = np.repeat(np.repeat(bad, heads // shape.kv_heads, axis=1), group_size, axis=-1)
        rows = some_pair(visible, bad)
        expected = {"out": rows, "lse": np.zeros(rows.shape[:-1], bool)}
        if of == "key":
            expected = {"out": rows.any(axis=-1, keepdims=True), "lse": rows.any(axis=-1)}
        for output, found in got.items():
            mask_of = np.broadcast_to(expected[output], found.shape)
            np.testing.assert_array_equal(found[~mask_of], clean[output][~mask_of], err_msg=f"{at}, {output}")
            assert is_nan(found, mx.float32)[mask_of].all(), f"{at}, {output}"
