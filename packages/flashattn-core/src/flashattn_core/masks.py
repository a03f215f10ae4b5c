"""Masks: small frozen descriptions of which keys a query sees, combined with ``&``.

A description replaces an array of L*S elements: kernels compute from it which keys a query sees. In all masks, query i
of L has position ``i + S - L`` among S keys: queries and keys are aligned at the lower right.

    Causal(), L=3, S=5      SlidingWindow(2)        KeyRange(1, 4)          Causal(), L=5, S=3
        1 1 1 0 0               0 1 1 0 0               0 1 1 1 0               0 0 0
        1 1 1 1 0               0 0 1 1 0               0 1 1 1 0               0 0 0
        1 1 1 1 1               0 0 0 1 1               0 1 1 1 0               1 0 0
                                                                                1 1 0
    a row of zeros gives an output of 0 and an lse of -inf                      1 1 1
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx

from . import _ext
from .argument_types import INT32_MAX, describe, integer, whole


class Mask:
    """Base of all masks. In ``mask & other`` a key is visible if it is visible in both.

    An ``mx.array`` must be the right operand: its own ``&`` does not accept masks.
    """

    def __and__(self, other: Mask | mx.array) -> Mask:
        if not isinstance(other, Mask | mx.array):
            both = f"{type(self).__name__} & {describe(other)}"
            raise ValueError(f"[Mask] {both}: expected a Mask or an mx.array on the right")
        return And(_parts(self) + _parts(other))


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees key j when ``j <= i + S - L``."""


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees its own position and the ``window - 1`` keys before it (Beltagy et al. 2020).

    Raises ValueError unless ``window`` is a whole number of at least 1.
    """

    window: int

    def __post_init__(self) -> None:
        window = whole("[SlidingWindow] window", self.window, 1, math.inf, "a whole number of at least 1")
        object.__setattr__(self, "window", window)  # numpy's arrays of one number have no hash


@dataclass(frozen=True, eq=False)
class KeyRange(Mask):
    """Queries see only keys ``start <= j < stop``: for left and right padding, or the used part of a cache.

    ``start`` and ``stop``: whole numbers, or int32 arrays of the batch's shape ``(*B)``; ``stop=None`` is the
    end. Bounds are clamped to 0..S; with ``start >= stop`` queries see nothing.
    Raises ValueError for bounds of another type; the op checks the arrays' shape when it is called.
    """

    start: int | mx.array = 0
    stop: int | mx.array | None = None

    def __post_init__(self) -> None:
        for name, bound in (("start", self.start), ("stop", 0 if self.stop is None else self.stop)):
            if isinstance(bound, mx.array):
                if not mx.issubdtype(bound.dtype, mx.integer):
                    raise ValueError(f"[KeyRange] {name} is an array of {bound.dtype}, expected int32")
            elif integer(bound) is None:
                raise ValueError(f"[KeyRange] {name} is {describe(bound)}, expected a whole number or an int32 array")


@dataclass(frozen=True, eq=False)
class Tree(Mask):
    """The last T keys are nodes of a tree: ``visible`` says which node sees which. All keys before them are visible.

    For speculative verification (Miao et al. 2023, SpecInfer): the drafted tokens form a tree, and each sees its
    ancestors. ``visible`` is a bool array ``(*B, T, T)``: ``visible[..., t, j]`` says whether node t sees node j. It
    may also be packed to uint32 ``(*B, T, ceil(T / 32))``, with node j as bit ``j % 32`` of word ``j // 32``. Query i
    is node ``i + T - L``. If L > T, the first L - T queries see no node of the tree.
    Raises ValueError for another dtype or shape; the op raises it if T is greater than S.
    """

    visible: mx.array
    _packed: tuple[mx.Stream, int, mx.array] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        visible = self.visible
        if not isinstance(visible, mx.array) or visible.dtype not in (mx.bool_, mx.uint32) or visible.ndim < 2:
            raise ValueError(
                f"[Tree] visible is {describe(visible)}, expected a bool array (*B, T, T) or packed uint32"
            )
        size = visible.shape[-2]
        columns = size if visible.dtype == mx.bool_ else (size + 31) // 32
        if size < 1 or visible.shape[-1] != columns:
            raise ValueError(
                f"[Tree] visible has shape {visible.shape}, expected (*B, T, T), or (*B, T, ceil(T / 32)) packed"
            )

    @property
    def bits(self) -> mx.array:
        """``visible``, packed. Layers share it until it is evaluated: after that, somebody may write to ``visible``."""
        if self.visible.dtype == mx.uint32:
            return self.visible
        now = mx.default_stream(mx.default_device()), _ext.array_id(self.visible)  # each thread has its own streams
        kept = self._packed
        if kept is None or kept[:2] != now or not _ext.is_unevaluated(kept[2]):
            kept = (*now, _ext.pack_tree(self.visible))
            object.__setattr__(self, "_packed", kept)
        return kept[2]

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> Tree:
        """The tree in which node t's parent is ``parents[t]``, an earlier node, or -1 for a root.

        Each node sees itself and its ancestors. Raises ValueError for a parent that is not an earlier node.
        """
        is_sequence = hasattr(parents, "__len__") and hasattr(parents, "__iter__")
        if not is_sequence or getattr(parents, "ndim", 1) == 0:  # a single number's array has both methods, too
            raise ValueError(f"[Tree] parents is {describe(parents)}, expected a sequence of whole numbers")
        rows: list[list[bool]] = []
        for node, given in enumerate(parents):
            parent = whole(f"[Tree] parents[{node}]", given, -1, node - 1, "-1 or an earlier node")
            row = list(rows[parent]) if parent >= 0 else [False] * len(parents)
            row[node] = True
            rows.append(row)
        if not rows:
            raise ValueError("[Tree] parents is empty, expected at least one node")
        return cls(mx.array(rows))


@dataclass(frozen=True, eq=False)
class And(Mask):
    """The result of ``&``. A key is visible if it is visible in all of ``parts``."""

    parts: tuple[Mask | mx.array, ...]


def lower(mask: object) -> dict[str, Any]:
    """Converts a mask of :func:`flash_attention` to inputs and options of csrc/call/inputs.def, by name.

    Raises ValueError for another object, and for two bool arrays, two additive arrays or two trees, because kernels
    read at most one of each.
    """
    lowered: dict[str, Any] = {}
    if mask is None:
        return lowered
    if isinstance(mask, str) and mask == "causal":  # comparing another type may fail
        return {"causal": True}
    for part in _parts(mask):
        if isinstance(part, mx.array):
            _keep_block_maps(part)
            _add(lowered, "visible" if part.dtype == mx.bool_ else "bias", part)
        elif isinstance(part, Causal):
            lowered["causal"] = True
        elif isinstance(part, SlidingWindow):
            lowered["causal"] = True
            lowered["window"] = min(lowered.get("window", INT32_MAX), part.window)
        elif isinstance(part, KeyRange):
            for name, given, narrower in (("key_start", part.start, mx.maximum), ("key_stop", part.stop, mx.minimum)):
                if given is not None:
                    bound = _int32(given)
                    lowered[name] = narrower(lowered[name], bound) if name in lowered else bound
        elif isinstance(part, Tree):
            _add(lowered, "tree", part.bits)
        else:
            raise ValueError(
                f"[flash_attention] mask holds {describe(part)}, expected one of the masks in flashattn_core.masks"
            )
    return lowered


def for_quick(mask: object) -> object:
    """Converts a mask of :func:`flash_attention` to an argument of ``_ext.quick()``. Raises the errors of lower()."""
    if mask is None or isinstance(mask, str):
        return mask
    if isinstance(mask, Causal | SlidingWindow):
        return _without_arrays(mask)
    return _ext.LoweredMask(**lower(mask))


@lru_cache
def _without_arrays(mask: Causal | SlidingWindow) -> _ext.LoweredMask:
    return _ext.LoweredMask(**lower(mask))


def _parts(mask: Any) -> tuple[Mask | mx.array, ...]:
    if isinstance(mask, And):
        return mask.parts
    if isinstance(mask, Mask | mx.array):
        return (mask,)
    raise ValueError(f"[flash_attention] mask is {describe(mask)}, expected None, 'causal', an mx.array or a Mask")


# By id() of a mask: its array_id(), which changes when an operator writes to the array in place, and what forgets it.
_kept: dict[int, tuple[int, Any]] = {}
_keeping = threading.RLock()  # a signal's handler may call attention while its thread holds the lock


def _keep_block_maps(mask: mx.array) -> None:
    """Lets layers that share a mask share its block map, until the map is evaluated or the array changes."""
    key = id(mask)
    kept = _kept.get(key)
    if (kept is not None and kept[0] == _ext.array_id(mask)) or _ext.is_tracing(mask):
        return
    with _keeping:
        if kept := _kept.get(key):
            kept[1]()
        array_id = _ext.keep_block_maps(mask)
        forget = weakref.finalize(mask, _forget_block_maps, key, array_id)
        forget.atexit = False  # masks that outlive this module need no memory back
        _kept[key] = array_id, forget


def _forget_block_maps(key: int, array_id: int) -> None:
    _kept.pop(key, None)
    _ext.forget_block_maps(array_id)


def _add(lowered: dict[str, Any], name: str, array: mx.array) -> None:
    if name in lowered:
        kind = {"visible": "bool array", "bias": "additive array", "tree": "Tree"}[name]
        expected = "expected at most one: combine the two first"
        raise ValueError(f"[flash_attention] mask holds two masks of kind {kind}, {expected}")
    lowered[name] = array


def _int32(bound: int | mx.array) -> mx.array:
    if not isinstance(bound, mx.array):
        return mx.array(max(-INT32_MAX, min(operator.index(bound), INT32_MAX)), dtype=mx.int32)
    if bound.dtype in (mx.int64, mx.uint64, mx.uint32):  # clamped to int32, not wrapped
        lowest = -INT32_MAX if bound.dtype == mx.int64 else 0
        bound = mx.clip(bound, lowest, INT32_MAX)
    return bound if bound.dtype == mx.int32 else bound.astype(mx.int32)
