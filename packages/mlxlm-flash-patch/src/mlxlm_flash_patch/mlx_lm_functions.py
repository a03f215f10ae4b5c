"""Replacements for mlx-lm functions that compute attention without `mx.fast.scaled_dot_product_attention`.

mlx-lm computes attention over quantised caches with plain MLX operations. A few models compute all of their attention
with plain operations. Gemma 2's function also computes projections and rope, and updates the cache. So the patch calls
this function, but passes a _Gemma2 object as `self` and as `cache`. MLX is lazy, so it evaluates the attention in this
function only if the call falls back.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import mlx.core as mx

from .caches import kv_bits
from .router import Function, appended, attend, beneath, flash_or, is_active, plain_call, state


def _replacement(original: Function, flash: Callable[..., mx.array]) -> Function:
    """Returns a function with the parameters of `flash`. For each call, flash_or() chooses `flash` or `original`."""

    @functools.wraps(original)
    def flash_or_original(*arguments: Any, **options: Any) -> mx.array:
        return flash_or(lambda: original(*arguments, **options), lambda: flash(*arguments, **options))

    flash_or_original.__signature__ = inspect.signature(flash)  # type: ignore[attr-defined]
    return flash_or_original


def quantised(original: Function) -> Function:
    """Replaces mlx-lm's attention over quantised caches."""

    def flash(
        queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8
    ) -> mx.array:
        out = plain_call(queries, q_keys, q_values, scale, mask, None, group_size, bits)
        if out is None:
            return attend(queries, q_keys, q_values, scale, mask, storage={"group_size": group_size, "bits": bits})
        return out

    return _replacement(original, flash)


def appending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the method that appends to quantised caches. On CUDA one kernel appends the rows of a decode step."""

    @functools.wraps(original)
    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        read = appended(self, keys, values, self.offset)
        if read is None:
            return original(self, keys, values)
        self.offset += keys.shape[2]
        usual = getattr(original.__globals__.get("QuantizedKVCache"), "keys_and_values", None)
        return read if getattr(type(self), "keys_and_values", None) is usual else self.keys_and_values()

    return update_and_fetch


def quantised_caches(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Replaces the function that makes a model's caches. After enable(kv_bits=...) they are quantised."""

    @functools.wraps(original)
    def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
        caches = original(model, max_kv_size)
        if kv_bits.wanted is None:
            return caches
        from .caches.making import quantise  # imported here, because it imports mlx-lm

        return quantise(model, caches, kv_bits.wanted)

    return make_prompt_cache


def any_cache(original: Function) -> Function:
    """Replaces the attention function that most models call.

    The replacement also takes sinks with quantised caches, for which mlx-lm's function raises an error. It does not if
    another library has replaced the attention over such caches, because that library may store them in another way.
    """

    @functools.wraps(original)
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> Any:
        is_quantised = cache is not None and hasattr(cache, "bits")  # mlx-lm recognises quantised caches by `bits`
        if is_quantised and hasattr(cache, "rows_of"):  # a cache of latent vectors
            rows = cache.rows_of(keys, values)
            if rows is not None:
                storage = {"group_size": cache.group_size, "bits": cache.bits}
                options = {"scale": scale, "mask": mask, "sinks": sinks}
                return flash_or(
                    lambda: mx.fast.scaled_dot_product_attention(queries, keys, values, **options),
                    lambda: attend(queries, rows, rows, storage=storage, **options),
                )
            is_quantised = False
        if not is_quantised:
            # If mx.fast has the patch's function, `original` would reach plain_call() through that function. Calling
            # plain_call() directly is faster.
            attention = mx.fast.scaled_dot_product_attention
            out = plain_call(queries, keys, values, scale, mask, sinks) if attention is state.mx_attention else None
            return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks) if out is None else out
        attention = beneath(original.__globals__["quantized_scaled_dot_product_attention"])
        if type(attention) is not FunctionType or attention.__globals__ is not globals():  # another library's
            return original(queries, keys, values, cache, scale, mask, sinks)
        out = plain_call(queries, keys, values, scale, mask, sinks, cache.group_size, cache.bits)
        if out is not None:
            return out
        if sinks is None:
            return original(queries, keys, values, cache, scale, mask, sinks)
        storage = {"group_size": cache.group_size, "bits": cache.bits}
        return flash_or(
            lambda: original(queries, keys, values, cache, scale, mask, sinks),
            lambda: attend(queries, keys, values, scale, mask, sinks, storage=storage),
        )

    return scaled_dot_product_attention


class _Gemma2:
    """One call of gemma2's attention. mlx-lm's code gets this object in place of both `self` and the cache.

    mlx-lm's code calls rope() with the queries and then with the keys, update_and_fetch() with the keys and values, and
    o_proj() with the outputs of the heads. Without a cache, positions begin at 0.
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
        B, H, L, _ = queries.shape
        heads = flash_or(
            lambda: written_out.reshape(B, L, H, -1).transpose(0, 2, 1, 3),
            lambda: attend(queries, self.keys, self.values, module.scale, self.mask, softcap=softcap),
        )
        out: mx.array = module.o_proj(heads.transpose(0, 2, 1, 3).reshape(B, L, -1))
        return out


def gemma2(original: Function) -> Function:
    """Replaces Gemma 2's attention, which has a softcap."""

    @functools.wraps(original)
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not is_active():
            return original(self, x, mask, cache)
        call = _Gemma2(self, cache, mask)
        # If query heads share key/value heads, mlx-lm's scores are (B, H_kv, group, L, S). A mask with four dimensions
        # lacks the axis `group`.
        if isinstance(mask, mx.array) and mask.ndim == 4 and self.repeats > 1:
            mask = mask[:, :, None]
        return original(call, x, mask, call)

    return call


def gear(original: Function) -> Function:
    """Replaces GEAR's attention, which has a softcap."""

    def flash(queries: mx.array, keys: Any, values: Any, scale: float, softcap: float, mask: Any) -> mx.array:
        return attend(queries, keys, values, scale, mask, softcap=softcap)

    return _replacement(original, flash)


def phi3small(original: Function) -> Function:
    """Replaces the attention of Phi-3-small's block-sparse layers."""

    def flash(self: Any, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any) -> mx.array:
        if isinstance(keys, mx.array):  # if they are quantised, attend() raises an error that says so
            _, visible = self._block_sparse_mask(queries.shape[2], keys.shape[2])
            visible = visible.reshape(-1, *visible.shape[-2:])  # (H_kv, group, L, S) -> (H, L, S)
            # mlx-lm adds even a bool mask to the scores. So True adds 1 to a score, and False hides no key.
            mask = visible if mask is None else mx.where(visible, mask.astype(queries.dtype), -float("inf"))
        return attend(queries, keys, values, scale, mask)

    return _replacement(original, flash)
