"""Models that write their attention out, and what takes the place of the function that does.

Nothing of a model's rope, projections or cache is copied: where those stand in the same function as the attention,
that function runs as it is, and is shown other things in place of `self` and the cache. What it computes of scores
is thrown away before anything of it is evaluated, or, for a call that falls back, used: MLX is lazy.

How these functions work is known of one version of them only: `source` holds them to it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import registry
from .obstacles import check_storage
from .route import Way, attend

Function = Callable[..., mx.array]


@dataclass(frozen=True)
class HandWritten:
    """One function of mlx-lm with attention in it."""

    module: str  # of mlx_lm.models
    function: str  # as in `Attention.__call__`
    source: str  # registry.fingerprint() of its text in the mlx-lm that this was tested with
    _make: Callable[[Function, Way], Function]

    def make(self, original: Function, is_open: Way) -> Function:
        """What takes the place of `original`."""
        return functools.update_wrapper(self._make(original, is_open), original)

    def check(self) -> None:
        """Raises RuntimeError, naming both fingerprints, when mlx-lm's function is not the one tested."""
        registry.check_source(self.module, self.function, self.source)


class _Gemma2:
    """One call of gemma2's attention: stands in for the module, as its code sees it, and for the cache.

    The code asks for the rotated queries, then for the rotated keys, gives keys and values to the cache, and the
    heads' outputs to `o_proj`. Without a cache positions begin at 0.
    """

    def __init__(self, module: Any, cache: Any, mask: Any) -> None:
        self.module, self.cache, self.mask = module, cache, mask
        self.offset = 0 if cache is None else cache.offset
        self.rotated: list[mx.array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def rope(self, x: mx.array, offset: Any) -> mx.array:
        self.rotated.append(self.module.rope(x, offset=offset))
        return self.rotated[-1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if self.cache is not None:
            keys, values = self.cache.update_and_fetch(keys, values)
        self.keys, self.values = keys, values
        return keys, values

    def o_proj(self, written_out: mx.array) -> mx.array:
        queries, module = self.rotated[0], self.module
        softcap = module.attn_logit_softcapping
        heads = attend(queries, self.keys, self.values, None, module.scale, self.mask, softcap=softcap)
        if heads is not None:
            B, _, L, _ = queries.shape
            written_out = heads.transpose(0, 2, 1, 3).reshape(B, L, -1)
        out: mx.array = module.o_proj(written_out)
        return out


def _gemma2(original: Function, is_open: Way) -> Function:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not is_open():
            return original(self, x, mask, cache)
        call = _Gemma2(self, cache, mask)
        # The scores have an axis for the group of a key/value head; a batch's masks have none.
        if isinstance(mask, mx.array) and mask.ndim == 4 and self.repeats > 1:
            mask = mask[:, :, None]
        return original(call, x, mask, call)

    return call


def _gear(original: Function, is_open: Way) -> Function:
    def softcap_attention(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, softcap: float, mask: Any
    ) -> mx.array:
        out = attend(queries, keys, values, None, scale, mask, softcap=softcap) if is_open() else None
        return original(queries, keys, values, scale, softcap, mask) if out is None else out

    return softcap_attention


def _phi3small(original: Function, is_open: Way) -> Function:
    def visible_and_bias(self: Any, queries: mx.array, keys: mx.array, mask: Any) -> mx.array:
        _, visible = self._block_sparse_mask(queries.shape[2], keys.shape[2])
        visible = visible.reshape(-1, *visible.shape[-2:])  # (H_kv, group, L, S) -> (H, L, S)
        # mlx-lm adds a bool mask to the scores: what it shows counts 1 more, and hides nothing.
        return visible if mask is None else mx.where(visible, mask.astype(queries.dtype), -float("inf"))

    def block_sparse_attention(
        self: Any, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
    ) -> mx.array:
        out = None
        if is_open():
            check_storage(keys, values, None)  # before the mask is made, which takes the shape of keys
            out = attend(queries, keys, values, None, scale, visible_and_bias(self, queries, keys, mask))
        return original(self, queries, keys, values, scale, mask) if out is None else out

    return block_sparse_attention


HAND_WRITTEN = (
    HandWritten("gemma2", "Attention.__call__", "2d6752739f0e58e5", _gemma2),
    HandWritten("gear", "_softcap_attention", "6e8aacdedc907ca0", _gear),
    HandWritten("phi3small", "Attention._block_sparse_attention", "80c13efe91a00897", _phi3small),
)
