"""flash_attention(): the only place where Python arguments are read."""

from __future__ import annotations

from typing import Any, Literal, overload

import mlx.core as mx

from . import _ext, checks
from .masks import Mask, lower

_SMALLEST_SOFTCAP = 1e-20  # below, scores / softcap could leave float32

Quantized = tuple[mx.array, mx.array, mx.array]  # weights, scales, biases
MaskLike = Mask | mx.array | Literal["causal"] | None


@overload
def flash_attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None = ...,
    mask: MaskLike = ...,
    *,
    softcap: float | None = ...,
    sinks: mx.array | None = ...,
    alibi_slopes: mx.array | None = ...,
    return_lse: Literal[False] = ...,
    kernel: str = ...,
    stream: Any = ...,
) -> mx.array: ...
@overload
def flash_attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None = ...,
    mask: MaskLike = ...,
    *,
    softcap: float | None = ...,
    sinks: mx.array | None = ...,
    alibi_slopes: mx.array | None = ...,
    return_lse: Literal[True],
    kernel: str = ...,
    stream: Any = ...,
) -> tuple[mx.array, mx.array]: ...
def flash_attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    alibi_slopes: mx.array | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    stream: Any = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Exact attention in memory linear in the sequence: ``softmax(query @ key.T * scale + mask) @ value``.

    FlashAttention-2 (Dao 2023, arXiv:2307.08691) for long queries, FlashDecoding (Dao et al. 2023) for up to 8.
    Lazy, like every MLX op. All arithmetic is float32 from the loaded element to the stored one: on bfloat16
    the result has exactly the bits of casting to float32, computing, and casting back.

    Args:
      query: ``(*B, H_q, L, D)``, float32, float16 or bfloat16, any strides, D from 1 to 512.
      key: ``(*B, H_kv, S, D)``, same dtype. ``H_q % H_kv == 0``; query head h reads kv head
        ``h // (H_q // H_kv)`` (grouped-query attention, Ainslie et al. 2023).
      value: ``(*B, H_kv, S, D_v)``, same dtype; D_v may differ from D.
      scale: multiplies ``query @ key.T``. None: ``1 / sqrt(D)``.
      mask: None, ``"causal"``, a :mod:`flashattn_core.masks` description, or an array that broadcasts to
        ``(*B, H_q, L, S)``: bool (True: visible), or of a dtype that promotes to query's, added to the scores.
        Causal is aligned to the lower right:

            L=2, S=5    1 1 1 1 0        L=5, S=2    0 0
                        1 1 1 1 1                    0 0
                                                     0 0
                                                     1 0
                                                     1 1
      softcap: scores become ``softcap * tanh(scores / softcap)`` after scale, before masks (Gemma 2).
      sinks: ``(H_q,)``, one extra logit a head that only adds to the softmax's denominator, and so to lse.
      alibi_slopes: ``(H_q,)``, adds ``-slope * |i + S - L - j|`` (Press et al. 2022).
      return_lse: also return lse.
      kernel: a kernel's name instead of ``"auto"``, see :func:`plan`.
      stream: stream or device to run on, as for any MLX op.

    Returns:
      out ``(*B, H_q, L, D_v)`` in query's dtype; with ``return_lse`` also lse ``(*B, H_q, L)``, float32, the
      natural logarithm of the softmax's denominator. A row that sees no key gives 0 and -inf, never NaN;
      NaN or infinity in a hidden key reaches nothing.

    Ctrl-C ends a long call (from 1e9 multiply-adds) on the CPU within a second, where the main thread waits for it.
    Its outputs are NaN then, and so is all that is computed from them: the weights of a training step, a cache, a file
    that is being saved. A program that keeps such things after KeyboardInterrupt installs a handler of SIGINT of its
    own: then calls finish.

    Raises:
      ValueError: bad arguments, naming the argument, what was expected and what came.
      NoKernelError: (a ValueError) no kernel covers the call; the text is the reason that :func:`plan` gives.
    """
    arguments = lowered_arguments(query, key, value, scale, mask, softcap, sinks, alibi_slopes, kernel)
    out, lse = _attention(arguments, stream)
    return (out, lse) if return_lse else out


@overload
def quantized_flash_attention(
    query: mx.array,
    key: Quantized,
    value: Quantized,
    scale: float | None = ...,
    mask: MaskLike = ...,
    *,
    group_size: int = ...,
    bits: int = ...,
    softcap: float | None = ...,
    sinks: mx.array | None = ...,
    alibi_slopes: mx.array | None = ...,
    return_lse: Literal[False] = ...,
    kernel: str = ...,
    stream: Any = ...,
) -> mx.array: ...
@overload
def quantized_flash_attention(
    query: mx.array,
    key: Quantized,
    value: Quantized,
    scale: float | None = ...,
    mask: MaskLike = ...,
    *,
    group_size: int = ...,
    bits: int = ...,
    softcap: float | None = ...,
    sinks: mx.array | None = ...,
    alibi_slopes: mx.array | None = ...,
    return_lse: Literal[True],
    kernel: str = ...,
    stream: Any = ...,
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
    softcap: float | None = None,
    sinks: mx.array | None = None,
    alibi_slopes: mx.array | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    stream: Any = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """:func:`flash_attention` on keys and values that are quantised, as mlx-lm's QuantizedKVCache holds them.

    Each tile is dequantised inside the kernel, in float32; the whole never is. There is no gradient.

    Args:
      query: ``(*B, H_q, L, D)``, float32, float16 or bfloat16, any strides, D up to 512.
      key, value: ``(weights, scales, biases)``, as ``mx.quantize(x, group_size, bits)`` makes them of arrays
        ``(*B, H_kv, S, D)`` and ``(*B, H_kv, S, D_v)``: weights uint32 ``(*B, H_kv, S, D * bits / 32)``; scales and
        biases ``(*B, H_kv, S, D / group_size)`` in float32, float16 or bfloat16, one dtype for all four.
      group_size: elements that share a scale and a bias: 32, 64 or 128.
      bits: of an element: 1, 2, 3, 4, 5, 6 or 8.
      The others: as in :func:`flash_attention`.

    Returns:
      As :func:`flash_attention` of the dequantised keys and values: out in query's dtype, and lse.

    Raises:
      ValueError, NoKernelError: as :func:`flash_attention`.
    """
    arguments = lowered_arguments(
        query,
        key,
        value,
        scale,
        mask,
        softcap,
        sinks,
        alibi_slopes,
        kernel,
        group_size=group_size,
        bits=checks.positive("bits", bits),
    )
    out, lse = _attention(arguments, stream)
    return (out, lse) if return_lse else out


def _attention(arguments: _ext.Arguments, stream: Any) -> tuple[mx.array, mx.array]:
    if checks.device_of(stream).type != mx.cpu and not mx.metal.is_available():
        raise _ext.NoKernelError("[flash_attention] stream is on a GPU, and this MLX has no Metal")
    out, lse = _ext.attention(arguments, stream)
    return out, lse


def lowered_arguments(
    query: mx.array,
    key: mx.array | Quantized,
    value: mx.array | Quantized,
    scale: float | None,
    mask: MaskLike,
    softcap: float | None,
    sinks: mx.array | None,
    alibi_slopes: mx.array | None,
    kernel: str,
    *,
    group_size: int = 0,
    bits: int | None = None,
) -> _ext.Arguments:
    """The arguments as ``_ext.attention`` and ``_ext.plan`` take them. Shapes and dtypes are checked there.

    `bits`: None if key and value are arrays, otherwise those of the tuples that they are.
    """
    checks.array("query", query)
    for name, given in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if given is not None:
            checks.array(name, given)
    quantised: dict[str, Any] = {}
    if bits is not None:
        key, quantised["key_scales"], quantised["key_biases"] = _quantized("key", key)
        value, quantised["value_scales"], quantised["value_biases"] = _quantized("value", value)
        quantised |= {"bits": bits, "group_size": checks.positive("group_size", group_size)}
    key_array, value_array = checks.array("key", key), checks.array("value", value)
    if not isinstance(kernel, str) or not kernel.isprintable():  # a std::string takes no surrogates, what() no NUL
        raise ValueError(f"[flash_attention] kernel is {checks.describe(kernel)}, expected 'auto' or a kernel's name")
    if scale is not None:
        scale = checks.finite("scale", scale)
    if softcap is not None:
        softcap = checks.finite("softcap", softcap)
        if softcap < _SMALLEST_SOFTCAP:
            raise ValueError(f"[flash_attention] softcap is {softcap}, expected a finite number above 0")
    m = lower(mask)
    return _ext.Arguments(
        query,
        key_array,
        value_array,
        scale=scale,
        softcap=0.0 if softcap is None else softcap,
        causal=m.causal,
        window=m.window,
        key_start=m.key_start,
        key_stop=m.key_stop,
        tree=m.tree,
        visible=m.visible,
        bias=m.bias,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        kernel=kernel,
        **quantised,
    )


def _quantized(name: str, given: object) -> Quantized:
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise ValueError(f"[flash_attention] {name} is a {type(given).__name__}, expected (weights, scales, biases)")
    weights, scales, biases = given
    return (
        checks.array(f"{name} (weights)", weights),
        checks.array(f"{name} (scales)", scales),
        checks.array(f"{name} (biases)", biases),
    )
