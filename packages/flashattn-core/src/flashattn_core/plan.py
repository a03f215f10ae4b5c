"""Shows what dispatch would choose for a call, and why. Nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from . import _ext, checks
from .attention import MaskLike, Quantized, lowered_arguments


@dataclass(frozen=True)
class Plan:
    """What a call would run: ``str(plan)`` is one line.

    ``kernel`` is its name, or None where no kernel covers the call on ``device``; ``reason`` says why, and ``shape``
    what was asked about, both in words.
    """

    device: Literal["cpu", "metal"]
    kernel: str | None
    reason: str
    shape: str

    def __str__(self) -> str:
        return f"{self.shape} on {self.device}: {self.kernel or 'no kernel'} ({self.reason})"


def plan(
    query: mx.array,
    key: mx.array | Quantized,
    value: mx.array | Quantized,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    device: Literal["cpu", "metal"] | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    alibi_slopes: mx.array | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    group_size: int = 64,
    bits: int = 8,
    stream: mx.Stream | mx.Device | None = None,
) -> Plan:
    """What :func:`flash_attention` would run for these arguments, or :func:`quantized_flash_attention`.

    Args:
      device: ``"cpu"`` or ``"metal"``, on any machine; None: the stream's, or MLX's default device.
      key, value: arrays, or tuples (weights, scales, biases), which alone have a group_size and bits.
      The others: as in :func:`flash_attention`, checked in the same way. return_lse decides nothing: lse is
        always computed.

    Raises:
      ValueError: bad arguments. A call that no kernel covers is no error here: its plan has kernel None and
        the reason that :func:`flash_attention` would raise.
    """
    where = checks.device_of(stream)
    if device is None:
        device = "cpu" if where.type == mx.cpu else "metal"
    if not isinstance(device, str) or device not in ("cpu", "metal"):
        raise ValueError(f"[plan] device is {checks.describe(device)}, expected 'cpu' or 'metal'")
    quantised = isinstance(key, tuple | list)
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
        bits=checks.positive("bits", bits) if quantised else None,
    )
    chosen, reason = _ext.plan(arguments, device == "metal")
    heads, length, head_dim = query.shape[-3:]
    kv_heads, key_length = (key if isinstance(key, mx.array) else key[0]).shape[-3:-1]
    dtype = str(query.dtype).removeprefix("mlx.core.")
    if quantised:
        dtype += f", keys and values of {bits} bits"
    shape = f"L {length}, S {key_length}, heads {heads}/{kv_heads}, D {head_dim}, {dtype}"
    return Plan(device, chosen, reason, shape)
