"""Hypothesis strategies that draw legal calls: their shapes, layouts in memory, masks and options."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from flashattn_core import flash_attention, quantized_flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree
from hypothesis import strategies as st

from tests.core.oracle import DTYPES, packs_one_bit

BATCHES = [(), (1,), (2,), (3,), (2, 2), (1, 2, 1), (2, 1, 1, 2), (1, 2, 1, 1, 2), (0,), (2, 0)]
BITS = [1, 2, 3, 4, 5, 6, 8] if packs_one_bit() else [2, 3, 4, 5, 6, 8]

lengths = st.integers(0, 9) | st.integers(0, 140)
dims = st.integers(1, 80) | st.integers(1, 512)
seeds = st.integers(0, 2**32 - 1)


class Case:
    """One call: its arrays by name, and functions that make the call's arguments from these arrays.

    Tests of mx.compile, mx.vmap and other transforms make the same call with other arrays.
    """

    def __init__(self, quantised: bool) -> None:
        self.quantised = quantised
        self.arrays: dict[str, mx.array] = {}
        self.made_of: dict[str, Callable[[dict[str, mx.array]], Any]] = {}  # argument -> function that makes it

    def arguments(self, arrays: dict[str, mx.array] | None = None) -> dict[str, Any]:
        arrays = self.arrays if arrays is None else arrays
        return {name: make(arrays) for name, make in self.made_of.items()}

    @property
    def function(self) -> Callable[..., Any]:
        return quantized_flash_attention if self.quantised else flash_attention

    def run(self, arrays: dict[str, mx.array] | None = None) -> tuple[mx.array, mx.array]:
        """Returns (out, lse)."""
        return self.function(**{**self.arguments(arrays), "return_lse": True})

    def __repr__(self) -> str:  # what hypothesis prints for a failing case
        shapes = {name: f"{a.dtype}{list(a.shape)}".removeprefix("mlx.core.") for name, a in self.arrays.items()}
        others = {k: v for k, v in self.arguments().items() if not isinstance(v, mx.array | tuple)}
        return f"Case({shapes}, {others}, quantised={self.quantised})"


@st.composite
def layouts(draw, array):
    """A view of the same numbers with another layout: axes in any order, some with gaps, some stored backwards."""
    order = draw(st.permutations(range(array.ndim)))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in order]
    for axis, step in enumerate(steps):
        if step == 2:
            array = mx.repeat(array, 2, axis=axis)
    backwards = tuple(slice(None, None, -1 if step == -1 else None) for step in steps)
    stored = mx.contiguous(array[backwards].transpose(order))
    view = stored.transpose(np.argsort(order).tolist())
    return view[tuple(slice(None, None, step) for step in steps)]


@st.composite
def tensors(draw, rng, dtype, *shape):
    """Random numbers in any layout, at times broadcast along one axis."""
    shared = draw(st.sampled_from([None] * 5 + list(range(len(shape)))))
    stored = tuple(min(n, 1) if axis == shared else n for axis, n in enumerate(shape))
    array = mx.array(rng.standard_normal(stored, dtype=np.float32)).astype(DTYPES[dtype])
    return mx.broadcast_to(draw(layouts(array)), shape)


@st.composite
def packed(draw, rng, dtype, group_size, bits, *shape):
    """Quantised random numbers as [weights, scales, biases]. Each of the three arrays has a layout of its own."""
    array = mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(DTYPES[dtype])
    return [draw(layouts(part)) for part in mx.quantize(array, group_size=group_size, bits=bits)]


@st.composite
def add_mask(draw, rng, case, dtype, batch, heads, length, key_len):
    """Adds a mask to the case. The mask combines any of the kinds of masks, each at most once, in any order."""
    arrays, parts = case.arrays, []
    bound = st.integers(-3, key_len + 3)
    if draw(st.booleans()):
        parts.append(lambda a: Causal())
    if draw(st.booleans()):
        window = draw(st.integers(1, key_len + 5))
        parts.append(lambda a: SlidingWindow(window))
    if draw(st.booleans()):
        if draw(st.booleans()):
            shape = tuple(n if draw(st.booleans()) else 1 for n in batch[draw(st.integers(0, len(batch))) :])
            kind = draw(st.sampled_from([np.int32, np.int64, np.int8]))
            arrays["start"], arrays["stop"] = (
                mx.array(rng.integers(-3, min(key_len + 4, 120), shape).astype(kind)) for _ in "ab"
            )
            parts.append(lambda a: KeyRange(a["start"], a["stop"]))
        else:
            start, stop = draw(bound), draw(bound | st.none())
            parts.append(lambda a: KeyRange(start, stop))
    if key_len and draw(st.booleans()):
        size = draw(st.integers(1, min(key_len, 70)))
        form = draw(st.sampled_from(["bool", "packed", "parents"]))
        if form == "parents":
            tree = Tree.from_parents([int(rng.integers(-1, node)) for node in range(size)])
            parts.append(lambda a: tree)
        else:
            leading = batch if draw(st.booleans()) else ()
            visible = mx.array(rng.random((*leading, size, size)) > 0.4)
            arrays["tree"] = draw(layouts(visible if form == "bool" else Tree(visible).bits))
            parts.append(lambda a: Tree(a["tree"]))
    target = (*batch, heads, length, key_len)
    for kind in draw(st.sampled_from([(), (), ("visible",), ("bias",), ("visible", "bias")])):
        ndim = draw(st.integers(0, len(target)))
        shape = tuple(n if draw(st.booleans()) else 1 for n in target[len(target) - ndim :])
        if kind == "visible":
            array = mx.array(rng.random(shape) > 0.3)
        else:
            numbers = np.where(rng.random(shape) > 0.8, -np.inf, rng.standard_normal(shape)).astype(np.float32)
            array = mx.array(numbers).astype(DTYPES[dtype])
        arrays[kind] = draw(layouts(array))
        parts.append(lambda a, kind=kind: a[kind])
    parts = draw(st.permutations(parts))

    def mask(a):
        # The first operand must be a Mask, because `&` of two arrays is no mask.
        made = sorted((part(a) for part in parts), key=lambda part: isinstance(part, mx.array))
        if len(made) > 1 and isinstance(made[0], mx.array):
            made.insert(0, KeyRange())
        return functools.reduce(operator.and_, made)

    if parts:
        case.made_of["mask"] = mask


@st.composite
def add_options(draw, rng, case, dtype, heads, length):
    if draw(st.booleans()):
        scale = draw(st.floats(-2, 2, width=32))
        case.made_of["scale"] = lambda a: scale
    if draw(st.booleans()):
        softcap = draw(st.floats(0.125, 100, width=32))
        case.made_of["softcap"] = lambda a: softcap
    for name in ("sinks", "alibi_slopes"):
        if draw(st.booleans()):
            numbers = rng.standard_normal(heads) * 3 if name == "sinks" else rng.random(heads)
            case.arrays[name] = draw(layouts(mx.array(numbers).astype(DTYPES[dtype])))
            case.made_of[name] = lambda a, name=name: a[name]
    kernels = ["auto", "auto", "cpu_prefill"] + ["cpu_decode"] * (length <= 8)
    if (kernel := draw(st.sampled_from(kernels))) != "auto":
        case.made_of["kernel"] = lambda a: kernel


@st.composite
def cases(draw, *, quantised=False, max_dim=512):
    """Legal calls of flash_attention(), or of quantized_flash_attention()."""
    rng = np.random.default_rng(draw(seeds))
    dtype = draw(st.sampled_from(list(DTYPES)))
    batch = draw(st.sampled_from(BATCHES))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7]))
    length = draw(lengths)
    # Cases with few queries may have up to 1100 keys, because decode kernels work on splits of 512 keys. Cases with
    # more queries have fewer keys, because the oracle is slow.
    key_len = draw(lengths | st.integers(500, 1100)) if length <= 8 and len(batch) < 2 else draw(lengths)
    case = Case(quantised)
    if quantised:
        bits, group_size = draw(st.sampled_from(BITS)), draw(st.sampled_from([32, 64, 128]))
        groups = st.integers(1, 3) | st.integers(1, 512 // group_size)
        dim, value_dim = draw(groups) * group_size, draw(groups) * group_size
        of_groups = draw(st.sampled_from(list(DTYPES)))
        for name, columns in (("key", dim), ("value", value_dim)):
            parts = draw(packed(rng, of_groups, group_size, bits, *batch, kv_heads, key_len, columns))
            names = [f"{name}_{part}" for part in ("weights", "scales", "biases")]
            case.arrays |= dict(zip(names, parts, strict=True))
            case.made_of[name] = lambda a, names=names: tuple(a[part] for part in names)
        case.made_of["bits"] = lambda a: bits
        case.made_of["group_size"] = lambda a: group_size
    else:
        sizes = dims.filter(lambda n: n <= max_dim)
        dim = draw(sizes)
        value_dim = draw(st.just(dim) | sizes)
        for name, columns in (("key", dim), ("value", value_dim)):
            case.arrays[name] = draw(tensors(rng, dtype, *batch, kv_heads, key_len, columns))
            case.made_of[name] = lambda a, name=name: a[name]
    heads = kv_heads * group
    case.arrays["query"] = draw(tensors(rng, dtype, *batch, heads, length, dim))
    case.made_of["query"] = lambda a: a["query"]
    draw(add_mask(rng, case, dtype, batch, heads, length, key_len))
    draw(add_options(rng, case, dtype, heads, length))
    return case
