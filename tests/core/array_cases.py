"""Array masks, most of which hide whole blocks of 32 queries and 32 keys, and a numpy version of their block maps."""

import flashattn_core
import mlx.core as mx
import numpy as np
from flashattn_core.masks import KeyRange, Mask, SlidingWindow


def positions(length: int, key_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the queries, as a column, and of the keys, as a row. The last query has the last position."""
    return np.arange(length)[:, None] + key_len - length, np.arange(key_len)[None]


def documents(length: int, key_len: int) -> np.ndarray:
    """Which keys are in the query's document. Documents begin at positions 0, 40, 100 and 230."""
    number = np.cumsum(np.isin(np.arange(key_len), (40, 100, 230)))
    return number[positions(length, key_len)[0].clip(0)] == number[None]


def visible(name: str, rng: np.random.Generator, length: int, key_len: int) -> np.ndarray:
    """Which keys each query sees under the mask of this name, as an array that broadcasts to (2, 4, L, S)."""
    query, key = positions(length, key_len)
    return {
        "window": lambda: (key <= query) & (query - key < 50),
        "causal": lambda: key <= query,
        "left padding": lambda: (key <= query) & (key >= np.array([[[[70]]], [[[133]]]])),
        "documents": lambda: documents(length, key_len),
        "prefix": lambda: (key <= query) | (key < 97),
        "gap": lambda: (key <= query) & ((key < 70) | (key > 200)),
        "holes": lambda: rng.random((length, key_len)) > 0.1,
        "per head": lambda: (query - key < np.array([30, 80, 300, 0])[:, None, None]) & (key <= query),
        "all": lambda: np.ones((length, key_len), bool),
        "none": lambda: np.zeros((length, key_len), bool),
    }[name]()


NAMES = ("window", "causal", "left padding", "documents", "prefix", "gap", "holes", "per head", "all", "none")


def as_array(kind: str, shown: np.ndarray, rng: np.random.Generator) -> mx.array:
    """An array mask that hides the elements where `shown` is False.

    kind: "bool", "additive" (random numbers and -inf) or "hiding" (0 and -inf).
    """
    if kind == "bool":
        return mx.array(shown)
    added = rng.standard_normal(shown.shape) if kind == "additive" else np.zeros(shown.shape)
    return mx.array(np.where(shown, added, -np.inf), mx.float32)


def expected_map(mask: mx.array) -> np.ndarray:
    """The block map as csrc/call/block_map.h defines it, computed by numpy."""
    array = np.array(mask if mask.dtype == mx.bool_ else mask.astype(mx.float32))
    shows = array if mask.dtype == mx.bool_ else array != -np.inf
    changes = ~array if mask.dtype == mx.bool_ else array != 0
    rows, keys = (-(-n // 32) for n in mask.shape[-2:])
    result = np.zeros((*mask.shape[:-2], rows, keys), np.uint8)
    for r in range(rows):
        for k in range(keys):
            block = (..., slice(32 * r, 32 * r + 32), slice(32 * k, 32 * k + 32))
            result[..., r, k] = shows[block].any((-2, -1)) + 2 * changes[block].any((-2, -1))
    return result


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """A mask with hidden and visible blocks, some of which contain -0 or NaN."""
    shown = mx.array(rng.random(shape) > np.round(rng.random(-(-shape[-1] // 32)).repeat(32)[: shape[-1]] * 2) / 2)
    if dtype == mx.bool_:
        return shown
    mask = mx.where(shown, mx.where(mx.arange(shape[-1]) < 30, 0.0, -0.0), -mx.inf).astype(dtype)
    return mx.where(mx.arange(shape[-1]) == 31, mx.array(mx.nan, dtype), mask)


def map_of(mask: Mask | mx.array, length: int, key_len: int) -> mx.array:
    """The block map that a call with this mask makes."""
    tensor = mx.zeros((1, 1, key_len, 8))
    call = flashattn_core.arguments.lowered(tensor[:, :, :length], tensor, tensor, None, mask)
    found = flashattn_core._ext.block_map(call)
    assert found is not None
    return found


def hiding_most(length: int, dtype: mx.Dtype) -> list[Mask | mx.array]:
    """Masks of shape (length, length) that hide nearly all keys, as Mask objects and as arrays."""
    window = np.tri(length, dtype=bool) & ~np.tri(length, k=-20, dtype=bool)
    arrays = [mx.array(window), mx.array(np.where(window, 0.0, -np.inf), dtype)]
    return [SlidingWindow(20), KeyRange(200, 260), *arrays]
