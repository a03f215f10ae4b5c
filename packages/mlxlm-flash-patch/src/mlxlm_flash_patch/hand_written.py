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
from .route import attend

Function = Callable[..., Any]


@dataclass(frozen=True)
class HandWritten:
    """One function of mlx-lm with attention in it."""

    module: str  # of mlx_lm.models
    function: str  # as in `Attention.__call__`
    source: str  # registry.fingerprint() of its text in the mlx-lm that this was tested with
    make: Callable[[Function, Function], Function]  # (the original, attend) -> what takes its place

    def routed(self, original: Function) -> Function:
        """What enable() puts in place of `original`: the same object each time."""
        return _made(self, original, False)

    def always(self, original: Function) -> Function:
        """What patch_model() makes one model call."""
        return _made(self, original, True)

    def check(self) -> None:
        """Raises RuntimeError, naming both fingerprints, when mlx-lm's function is not the one tested."""
        registry.check_source(self.module, self.function, self.source)


@functools.lru_cache(maxsize=registry.KEPT)
def _made(what: HandWritten, original: Function, always: bool) -> Function:
    made = what.make(original, functools.partial(attend, always=True) if always else attend)
    return functools.update_wrapper(made, original)


class _Gemma2:
    """One call of gemma2's attention: stands in for the module, as its code sees it, and for the cache.

    The code asks for the rotated queries, then for the rotated keys, gives keys and values to the cache, and the
    heads' outputs to `o_proj`. Without a cache positions begin at 0.
    """

    def __init__(self, module: Any, cache: Any, mask: Any, attend: Function) -> None:
        self.module, self.cache, self.mask, self.attend = module, cache, mask, attend
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
        B, H, L, _ = queries.shape
        heads = self.attend(
            queries,
            self.keys,
            self.values,
            None,
            module.scale,
            self.mask,
            softcap=module.attn_logit_softcapping,
            own=lambda: written_out.reshape(B, L, H, -1).transpose(0, 2, 1, 3),
        )
        out: mx.array = module.o_proj(heads.transpose(0, 2, 1, 3).reshape(B, L, -1))
        return out


def _gemma2(original: Function, attend: Function) -> Function:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        call = _Gemma2(self, cache, mask, attend)
        # The scores have an axis for the group of a key/value head; a batch's masks have none.
        if isinstance(mask, mx.array) and mask.ndim == 4 and self.repeats > 1:
            mask = mask[:, :, None]
        attended: mx.array = original(call, x, mask, call)
        return attended

    return call


def _gear(original: Function, attend: Function) -> Function:
    def softcap_attention(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, softcap: float, mask: Any
    ) -> mx.array:
        attended: mx.array = attend(
            queries,
            keys,
            values,
            None,
            scale,
            mask,
            softcap=softcap,
            own=lambda: original(queries, keys, values, scale, softcap, mask),
        )
        return attended

    return softcap_attention


def _phi3small(original: Function, attend: Function) -> Function:
    def block_sparse_attention(
        self: Any, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
    ) -> mx.array:
        _, visible = self._block_sparse_mask(queries.shape[2], keys.shape[2])
        visible = visible.reshape(-1, *visible.shape[-2:])  # (H_kv, group, L, S) -> (H, L, S)
        if mask is not None:
            # mlx-lm adds a bool mask to the scores: what it shows counts 1 more, and hides nothing.
            visible = mx.where(visible, mask.astype(queries.dtype), -float("inf"))
        attended: mx.array = attend(
            queries,
            keys,
            values,
            None,
            scale,
            visible,
            own=lambda: original(self, queries, keys, values, scale, mask),
        )
        return attended

    return block_sparse_attention


HAND_WRITTEN = (
    HandWritten("gemma2", "Attention.__call__", "2d6752739f0e58e5", _gemma2),
    HandWritten("gear", "_softcap_attention", "6e8aacdedc907ca0", _gear),
    HandWritten("phi3small", "Attention._block_sparse_attention", "80c13efe91a00897", _phi3small),
)
