"""The public ops: flash_attention() and quantized_flash_attention()."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import mlx.core as mx

from . import _ext
from . import argument_types as types
from .arguments import MaskLike, Options, Precision, Quantized, lowered
from .masks import for_quick


@overload
def flash_attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> mx.array: ...
@overload
def flash_attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[mx.array, mx.array]: ...
def flash_attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    return_lse: bool = False,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    alibi_slopes: mx.array | None = None,
    kernel: str = "auto",
    precision: Precision = "float32",
    stream: Any = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Exact attention in memory linear in the sequence: ``softmax(query @ key.T * scale + mask) @ value``.

    Uses FlashAttention-2 (Dao 2023, arXiv:2307.08691) for many queries, and FlashDecoding (Dao et al. 2023) for few.
    The result is lazy, like that of every MLX op. By default all arithmetic between loading the inputs and storing the
    output is float32. A bfloat16 result equals float32 attention rounded once. On CUDA the last bit may differ.

    Args:
      query: ``(*B, H_q, L, D)``, float32, float16 or bfloat16, any strides, D from 1 to 512.
      key: ``(*B, H_kv, S, D)``, query's dtype. ``H_q % H_kv == 0``; query head h reads kv head
        ``h // (H_q // H_kv)`` (grouped-query attention, Ainslie et al. 2023).
      value: ``(*B, H_kv, S, D_v)``, query's dtype; D_v may differ from D.
      scale: multiplies ``query @ key.T``. None: ``1 / sqrt(D)``.
      mask: None, ``"causal"``, a :mod:`flashattn_core.masks` description, or an array that broadcasts to
        ``(*B, H_q, L, S)``. A bool array is True where a key is visible; an array of another dtype, which must
        promote to query's, is added to the scores. Causal is aligned to the lower right:

            L=2, S=5    1 1 1 1 0        L=5, S=2    0 0
                        1 1 1 1 1                    0 0
                                                     0 0
                                                     1 0
                                                     1 1
      softcap: scores become ``softcap * tanh(scores / softcap)`` after scale, before masks (Gemma 2).
      sinks: ``(H_q,)``, one extra logit per head that only adds to the softmax's denominator, and so to lse.
      alibi_slopes: ``(H_q,)``, adds ``-slope * |i + S - L - j|`` for query i and key j (Press et al. 2022).
      return_lse: also return lse.
      kernel: a kernel's name instead of ``"auto"``, see :func:`plan`.
      precision: ``"float32"``: all arithmetic between input and output is float32-accurate. ``"input"``: with 16-bit
        inputs, CUDA kernels may round the probabilities (in the gradient P and dS) and dequantised keys and values
        once to the inputs' dtype where that is faster. On other backends ``"input"`` has no effect.
      stream: stream or device to run on, as for any MLX op.

    Returns:
      out ``(*B, H_q, L, D_v)`` in query's dtype; with ``return_lse`` also lse ``(*B, H_q, L)``, float32, the
      natural logarithm of the softmax's denominator. A row that sees no key gives 0 and -inf, never NaN.
      NaN or infinity in a hidden key does not affect the result.

    Kernels compute the gradients of query, key, value and sinks, in linear memory. MLX's own operations compute
    the gradients of additive masks and ALiBi slopes, ``mx.jvp``, second derivatives, and exported functions, in
    memory that grows with L * S.

    Raises:
      ValueError: a bad argument; the text names it, what was expected and what was given.
      NoKernelError: (a ValueError) no kernel covers the call; the text is the reason that :func:`plan` gives.
    """
    is_plain = softcap is None and alibi_slopes is None and stream is None and return_lse is False
    if is_plain and isinstance(kernel, str) and kernel == "auto":
        out = _ext.quick(query, key, value, scale, for_quick(mask), sinks, types.rounds(precision))
        if out is not None:
            return out
    call = lowered(
        query,
        key,
        value,
        scale,
        mask,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        kernel=kernel,
        precision=precision,
    )
    return _attention(call, return_lse, stream)


@overload
def quantized_flash_attention(
    query: mx.array,
    key: Quantized,
    value: Quantized,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    group_size: int = 64,
    bits: int = 8,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> mx.array: ...
@overload
def quantized_flash_attention(
    query: mx.array,
    key: Quantized,
    value: Quantized,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    group_size: int = 64,
    bits: int = 8,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[mx.array, mx.array]: ...
def quantized_flash_attention(
    query: mx.array,
    key: Quantized,
    value: Quantized,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    group_size: int = 64,
    bits: int = 8,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> mx.array | tuple[mx.array, mx.array]:
    """:func:`flash_attention` on quantised keys and values, in the layout of mlx-lm's QuantizedKVCache.

    Kernels dequantise one tile at a time, to float32. For more than 16 queries of 16 bits, CUDA's kernels first copy
    all keys and values to 16-bit arrays. Query, key and value have no gradient.

    Args:
      query: ``(*B, H_q, L, D)``, float32, float16 or bfloat16, any strides, D up to 512.
      key, value: ``(weights, scales, biases)`` from ``mx.quantize(x, group_size, bits)`` for x of shape
        ``(*B, H_kv, S, D)`` or ``(*B, H_kv, S, D_v)``: weights uint32 ``(*B, H_kv, S, D * bits / 32)``; scales and
        biases ``(*B, H_kv, S, D / group_size)``, float32, float16 or bfloat16, all of the same dtype.
      group_size: elements that share a scale and a bias: 32, 64 or 128.
      bits: per element: 1, 2, 3, 4, 5, 6 or 8.
      The others: as in :func:`flash_attention`.

    Returns:
      What :func:`flash_attention` returns for the dequantised keys and values: out in query's dtype, and lse.

    Raises:
      ValueError, NoKernelError: as :func:`flash_attention`.
    """
    is_plain = return_lse is False and options.keys() <= {"precision"} and type(bits) is type(group_size) is int
    if is_plain and 0 < bits <= 8 and 0 < group_size <= 128:
        rounds = types.rounds(options.get("precision", "float32"))
        out = _ext.quick(query, key, value, scale, for_quick(mask), None, rounds, None, None, group_size, bits)
        if out is not None:
            return out
    call = lowered(query, key, value, scale, mask, group_size=group_size, bits=bits, **options)
    return _attention(call, return_lse, options.get("stream"))


def _attention(call: _ext.Arguments, return_lse: bool, stream: Any) -> mx.array | tuple[mx.array, mx.array]:
    if stream is not None and types.backend_of(stream) == "metal" and not mx.metal.is_available():
        raise _ext.NoKernelError("[flash_attention] stream is on a GPU, but this MLX has neither Metal nor CUDA")
    out: mx.array | tuple[mx.array, mx.array] = _ext.attention(call, types.boolean("return_lse", return_lse), stream)
    return out
