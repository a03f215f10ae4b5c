"""Shows what dispatch would choose for a call, and why. Nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Unpack

import mlx.core as mx

from . import _ext
from . import argument_types as types
from .arguments import MaskLike, Options, Precision, Quantized, lowered

Device = Literal["cpu", "metal", "cuda"]


@dataclass(frozen=True)
class Plan:
    """What a call would run: ``str(plan)`` is one line.

    ``kernel`` is its name, or None where no kernel covers the call on ``device``; ``precision`` is the one that it
    computes in; ``reason`` says why it is taken, and ``shape`` what was asked about, both in words.
    """

    device: str
    kernel: str | None
    precision: Precision
    reason: str
    shape: str

    def __str__(self) -> str:
        chosen = f"{self.kernel}, precision {self.precision}" if self.kernel else "no kernel"
        return f"{self.shape} on {self.device}: {chosen} ({self.reason})"


def plan(
    query: mx.array,
    key: mx.array | Quantized,
    value: mx.array | Quantized,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    device: Device | None = None,
    return_lse: bool = False,
    group_size: int = 64,
    bits: int = 8,
    **options: Unpack[Options],
) -> Plan:
    """What :func:`flash_attention` would run for these arguments, or :func:`quantized_flash_attention`.

    Args:
      device: ``"cpu"``, ``"metal"`` or ``"cuda"``, on any machine; None: the stream's, or MLX's default device.
        ``"cuda"`` is the GPU that MLX has; where it has none, one that is not of compute capability 9.0.
      key, value: arrays, or tuples (weights, scales, biases), which alone have a group_size and bits.
      The others: as in :func:`flash_attention`, checked in the same way. return_lse decides nothing.

    Raises:
      ValueError: bad arguments. A call that no kernel covers is no error here: its plan has kernel None and
        the reason that :func:`flash_attention` would raise.
    """
    where = _backend("plan", device, options.get("stream"))
    quantised = isinstance(key, tuple | list)
    storage = {"group_size": group_size, "bits": types.positive("bits", bits)} if quantised else {}
    chosen, reason, rounds = _ext.plan(lowered(query, key, value, scale, mask, **storage, **options), where)
    heads, length, head_dim = query.shape[-3:]
    kv_heads, key_length = (key if isinstance(key, mx.array) else key[0]).shape[-3:-1]
    dtype = str(query.dtype).removeprefix("mlx.core.")
    if quantised:
        dtype += f", keys and values of {bits} bits"
    shape = f"L {length}, S {key_length}, heads {heads}/{kv_heads}, D {head_dim}, {dtype}"
    return Plan(where, chosen, "input" if rounds else "float32", reason.removeprefix("[flash_attention] "), shape)


def max_head_dim(device: Device | None = None, *, gradient: bool = False, quantised: bool = False) -> int:
    """The largest head_dim, of keys and of values, that some kernel takes; 0 where none does.

    Args:
      device: as in :func:`plan`.
      gradient: of the kernels that compute it; otherwise of the forward pass.
      quantised: with quantised keys and values.

    Raises:
      ValueError: for another device.
    """
    return _ext.max_head_dim(_backend("max_head_dim", device, None), gradient, quantised)


def _backend(function: str, device: object, stream: object) -> str:
    here = types.device_of(stream)
    if device is None:
        return _ext.backend_of(here)
    if not isinstance(device, str) or device not in ("cpu", "metal", "cuda"):
        raise ValueError(f"[{function}] device is {types.describe(device)}, expected 'cpu', 'metal' or 'cuda'")
    return device
