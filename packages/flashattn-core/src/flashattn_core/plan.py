"""plan(): which kernel a call would run, and why. Nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Unpack

import mlx.core as mx

from . import _ext
from . import argument_types as types
from .arguments import MaskLike, Options, Precision, Quantized, lowered

Device = Literal["cpu", "metal", "cuda"]


@dataclass(frozen=True)
class Estimate:
    """How long one attention takes for a call, relative to the other estimate for this call.

    ``pairs``: the pairs of a query and a key that it computes. ``cost``: of a pair, relative to MLX's own fused kernel.
    ``source``: where the cost comes from, such as ``"never measured"``.
    """

    pairs: float
    cost: float
    source: str

    def __str__(self) -> str:
        return f"{self.pairs:.3g} pairs x {self.cost:.3g}, {self.source}"


@dataclass(frozen=True)
class Plan:
    """The kernel that a call would run. ``str(plan)`` is one line.

    ``kernel``: the kernel's name, or None if no kernel covers the call on ``device``. ``precision``: the kernel's
    precision. ``reason``: why it was chosen, in words. ``shape``: the call's sizes and dtype, in words. On a GPU,
    ``ours`` and ``mlx`` are the estimates of the kernel and of MLX's own attention; ``mlx`` is None if MLX has no fused
    kernel for the call. A call that names its kernel has neither. ``is_left``: whether the patch leaves the call
    to MLX.
    """

    device: str
    kernel: str | None
    precision: Precision
    reason: str
    shape: str
    ours: Estimate | None = None
    mlx: Estimate | None = None
    is_left: bool = False

    def __str__(self) -> str:
        chosen = f"{self.kernel}, precision {self.precision}" if self.kernel else "no kernel"
        lines = f"{self.shape} on {self.device}: {chosen} ({self.reason})"
        if self.ours:
            theirs = f"MLX's own: {self.mlx.pairs:.3g} pairs" if self.mlx else "MLX's own is not fused"
            lines += f"; estimates: {self.ours}; {theirs}" + "; the patch leaves it to MLX" * self.is_left
        return lines


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
    """Returns the kernel that :func:`flash_attention` or :func:`quantized_flash_attention` would run.

    Args:
      device: ``"cpu"``, ``"metal"`` or ``"cuda"``, on any machine; None: the stream's, or MLX's default device.
        ``"cuda"`` means the GPU that MLX uses; without one, a GPU whose compute capability is not 9.0.
      key, value: arrays, or tuples (weights, scales, biases) quantised with `group_size` and `bits`.
      The others: as in :func:`flash_attention`, checked in the same way. return_lse has no effect.

    Raises:
      ValueError: bad arguments. For a call that no kernel covers, plan() raises nothing: the plan's kernel is None,
        and its reason is the error that :func:`flash_attention` would raise.
    """
    where = _backend("plan", device, options.get("stream"))
    types.boolean("return_lse", return_lse)
    storage = {"group_size": group_size, "bits": bits} if isinstance(key, tuple | list) else {}
    arguments = lowered(query, key, value, scale, mask, **storage, **options)
    try:
        chosen = _ext.plan(arguments, where)
    except _ext.NoKernelError as error:
        reason = str(error).removeprefix("[flash_attention] ")
        return Plan(where, None, "float32", reason, _in_words(arguments.call))
    precision: Precision = "input" if chosen.variant.rounds else "float32"
    name, is_gpu = chosen.variant.kernel.name, where != "cpu"
    ours = Estimate(chosen.ours.pairs, chosen.ours.cost, chosen.ours.source) if is_gpu and chosen.ours.cost else None
    mlx = Estimate(chosen.mlx.pairs, chosen.mlx.cost, chosen.mlx.source) if chosen.mlx else None
    return Plan(where, name, precision, chosen.why, _in_words(arguments.call), ours, mlx, chosen.is_left)


def _in_words(call: _ext.Call) -> str:
    text = f"L {call.query_len}, S {call.key_len}, heads {call.heads}/{call.kv_heads}, D {call.head_dim}"
    text += f", {str(call.dtype).removeprefix('mlx.core.')}"
    return f"{text}, keys and values of {call.bits} bits" if call.bits else text


def max_head_dim(device: Device | None = None, *, gradient: bool = False, quantised: bool = False) -> int:
    """The largest head_dim, of keys and of values, that some kernel supports; 0 if none does.

    Args:
      device: as in :func:`plan`.
      gradient: ask about the kernels that compute gradients, not about the forward pass.
      quantised: ask about quantised keys and values.

    Raises:
      ValueError: `device` is none of those that :func:`plan` takes.
    """
    return _ext.max_head_dim(_backend("max_head_dim", device, None), gradient, quantised)


def _backend(function: str, device: object, stream: object) -> str:
    here = types.backend_of(stream)
    if device is None:
        return here
    if not isinstance(device, str) or device not in ("cpu", "metal", "cuda"):
        raise ValueError(f"[{function}] device is {types.describe(device)}, expected 'cpu', 'metal' or 'cuda'")
    return device
