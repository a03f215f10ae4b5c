"""What was measured on this machine: how long calls take each kernel, and MLX's own attention.

`mlxlm-flash tune` writes the table. It is JSON in the user's folder of caches, for one device and the versions that
were measured: on another device, or after an update, it counts no more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import log2
from pathlib import Path

import mlx.core as mx

from . import _ext

MLX = "mlx"  # among the kernels: MLX's own attention, as mlx-lm calls it


@dataclass(frozen=True)
class Call:
    """A call's kind and lengths."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    query_len: int
    key_len: int
    batch_size: int = 1
    window: int = 0  # keys that a query sees; 0: all before it
    sinks: bool = False
    bits: int = 0  # of quantised keys and values; 0: they are not

    def __str__(self) -> str:
        parts = [f"{self.heads}/{self.kv_heads}x{self.head_dim}", f"{self.query_len} x {self.key_len}", self.dtype]
        parts += [f"batch of {self.batch_size}"] * (self.batch_size > 1) + [f"window {self.window}"] * (self.window > 0)
        return ", ".join([*parts, *["sinks"] * self.sinks, *[f"{self.bits} bits"] * (self.bits > 0)])

    def distance(self, other: Call) -> float:
        """How far apart two calls are; infinite where one tells nothing about the other."""
        if self._class() != other._class():
            return float("inf")
        return sum(abs(log2(a / b)) for a, b in zip(self._sizes(), other._sizes(), strict=True))

    def _sizes(self) -> tuple[float, ...]:
        seen, streams = min(self.window or self.key_len, self.key_len), self.batch_size * self.kv_heads
        return (self.query_len, seen, self.key_len, self.head_dim, self.heads / self.kv_heads, streams)

    def _class(self) -> tuple[int, bool, bool]:
        return (int(getattr(mx, self.dtype).size), self.bits > 0, self.sinks)


@dataclass
class Measured:
    """seconds and peak bytes of one call, by kernel; MLX's own among them if it can."""

    call: Call
    seconds: dict[str, float]
    bytes: dict[str, int]

    def fastest(self) -> str:
        """Of our kernels."""
        return min((name for name in self.seconds if name != MLX), key=self.seconds.__getitem__)

    def is_worth_it(self) -> bool:
        """Whether flash attention is faster than MLX's own, or needs less than half of the memory."""
        if MLX not in self.seconds:
            return True
        best = self.fastest()
        return self.seconds[best] < self.seconds[MLX] or 2 * self.bytes[best] < self.bytes[MLX]


def software(device: mx.Device) -> dict[str, str]:
    """What a table is of."""
    name = str(mx.device_info(device)["device_name"])
    return {"device": name, "mlx": version("mlx"), "flashattn-core": version("flashattn-core")}


def path() -> Path:
    """Of the table. Raises LookupError where the system names no folder for caches."""
    folder = _ext.cache_folder()
    if not folder:
        raise LookupError("there is no folder for caches: set FLASHATTN_CACHE, XDG_CACHE_HOME or HOME")
    return Path(folder, "tuned.json")


def write(measured: Iterable[Measured], device: mx.Device) -> Path:
    """At once: another process reads all of it or what was there before."""
    table = {**software(device), "calls": [asdict(each) for each in measured]}
    unfinished = path().with_suffix(f".{os.getpid()}")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(json.dumps(table, indent=1))
    return unfinished.replace(path())


def read(device: mx.Device) -> list[Measured]:
    """Of this device and these versions; empty if there is none. Raises ValueError for a file that is no table."""
    try:
        text = path().read_text()
    except (OSError, LookupError):
        return []
    try:
        table = json.loads(text)
        if {name: table[name] for name in software(device)} != software(device):
            return []
        return [Measured(Call(**each["call"]), each["seconds"], each["bytes"]) for each in table["calls"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path()} is no table of mlxlm-flash tune, delete it: {error!r}") from error


def nearest(table: Iterable[Measured], call: Call) -> Measured | None:
    """What was measured and is most like the call; None where nothing tells about it."""
    best = min(table, key=lambda each: each.call.distance(call), default=None)
    return None if best is None or best.call.distance(call) == float("inf") else best
