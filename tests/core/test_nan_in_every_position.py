"""NaN or infinity in one input element reaches only outputs that depend on the element. Other outputs keep their bits.

A row does not depend on keys that the mask hides from the row, forward or backward. NaN must reach every output that
depends on the element. Infinity may vanish, because a key of score -inf has no weight.
"""

from dataclasses import asdict, dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
from flashattn_core.reference import visible_and_bias

from tests.core.gradient_oracle import Call, draw_call, flash
from tests.core.oracle import to_numpy
from tests.core.test_quantised import normal
from tests.promises import promise

POISONS = [np.nan, np.inf, -np.inf]
POSITIONS = 8  # the largest number of elements that are tried in each input


@dataclass(frozen=True)
class Shape:
    length: int
    key_len: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 3
    value_dim: int = 5

    def __str__(self) -> str:
        return f"{self.length}x{self.key_len}"


# Some shapes fit in one SIMD vector or one tile. Others take several splits, tiles and bands of rows.
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
        "bias": mx.array(np.where(rng.random((s.heads, s.length, s.key_len)) > 0.3, 0.5, -np.inf), mx.float32),
        "sinks": normal(rng, s.heads),
        "alibi_slopes": mx.array(rng.random(s.heads), mx.float32),
        "softcap": 4.0,
    },
}


def outputs(call: Call, mask=None, bias=None, **arrays) -> dict[str, mx.array]:
    """out, lse and the gradients of the call, with these arrays in place of its own."""
    (out, lse), gradients = flash(replace(call, mask=mask if bias is None else mask & bias, **arrays))
    named = {"out": out, "lse": lse, "dquery": gradients.dq, "dkey": gradients.dk, "dvalue": gradients.dv}
    return named if gradients.dsinks is None else named | {"dsinks": gradients.dsinks}


def some_pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The matrix product of bool arrays."""
    return (a.astype(np.float32) @ b.astype(np.float32)) > 0


def reached(visible: np.ndarray, shape: Shape, bad: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Which elements of the outputs depend on bad elements of the inputs. `visible` has shape (1, heads, L, S)."""
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


def with_one_bad_element(rng, array: mx.array, poisons):
    """For some elements, yields the array with a bad number there, that number, and a mask of the element."""
    for flat in rng.permutation(array.size)[:POSITIONS]:
        bad = (np.arange(array.size) == flat).reshape(array.shape)
        poison = rng.choice(poisons)
        yield mx.where(mx.array(bad), mx.array(poison, array.dtype), array), poison, bad


def assert_reached(got, clean, expected, poison, where: str) -> None:
    """NaN must be in all expected elements, and all others must have the clean call's bits."""
    for output, found in got.items():
        mask = np.broadcast_to(expected[output], found.shape)
        assert np.array(bits(found) == bits(clean[output]))[~mask].all(), f"{poison} in {where}, seen in {output}"
        if np.isnan(poison):
            assert np.array(mx.isnan(found))[mask].all(), f"{where}, {output}"


def bits(a: mx.array) -> mx.array:
    return a.view(mx.uint32 if a.dtype.size == 4 else mx.uint16)


@promise("NaN reaches all that depends on it, forward and backward, and nothing else")
@pytest.mark.rotate(7)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_reaches_what_depends_on_it(rng, shape, mask, dtype):
    call = draw_call(rng, **asdict(shape), dtype=dtype)
    options = MASKS[mask](rng, shape)
    call = replace(call, softcap=options.pop("softcap", None))
    described = options.pop("mask", None)
    options = {k: v if k == "alibi_slopes" else v.astype(call.query.dtype) for k, v in options.items()}
    arrays = {name: getattr(call, name) for name in ("query", "key", "value", "dout", "dlse")} | options
    whole = described & options["bias"] if "bias" in options else described
    visible, _ = visible_and_bias(call.query.shape, shape.key_len, whole)
    clean = outputs(call, described, **arrays)
    untouched = {name: np.zeros(a.shape, bool) for name, a in arrays.items()}
    for name, array in arrays.items():
        # A bias of -inf is not replaced, because another number would make the hidden key visible.
        for changed, poison, bad in with_one_bad_element(rng, array, POISONS[:2] if name == "bias" else POISONS):
            if name == "bias" and np.isneginf(to_numpy(array)[bad]):
                continue
            got = outputs(call, described, **{**arrays, name: changed})
            assert_reached(got, clean, reached(visible, shape, {**untouched, name: bad}), poison, name)
