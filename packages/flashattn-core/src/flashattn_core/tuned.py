"""What was measured on a GPU: how long calls take each kernel, and MLX's own attention.

`mlxlm-flash tune` writes the table. It is JSON in the user's folder of caches, for one device and the versions that
were measured: on another device, or after an update, it counts no more. The package brings tables of some devices, in
the folder `measured`, which count for calls that the user's has not.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from math import inf, log2
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import _ext

MLX = "mlx"  # among the kernels: MLX's own attention, as mlx-lm calls it
_BROUGHT = Path(__file__).parent / "measured"
_LITTLE = 2**24  # bytes that are not worth any time
_FLAG = 16.0  # in how far two calls differ of which one has what the other has not: more than most lengths do


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
    softcap: bool = False
    sinks: bool = False
    padded: bool = False  # sequences have ranges of keys, or a mask that is an array
    bits: int = 0  # of quantised keys and values; 0: they are not

    def __str__(self) -> str:
        parts = [f"{self.heads}/{self.kv_heads}x{self.head_dim}", f"{self.query_len} x {self.key_len}", self.dtype]
        parts += [f"batch of {self.batch_size}"] * (self.batch_size > 1) + [f"window {self.window}"] * (self.window > 0)
        parts += [name for name in ("softcap", "sinks", "padded") if getattr(self, name)]
        return ", ".join([*parts, *[f"{self.bits} bits"] * (self.bits > 0)])

    def distance(self, other: Call) -> float:
        """How far apart two calls are; infinite where one tells nothing about the other."""
        if self._storage() != other._storage():
            return inf
        sizes = sum(abs(log2(a / b)) for a, b in zip(self._sizes(), other._sizes(), strict=True))
        return sizes + _FLAG * sum(a != b for a, b in zip(self._flags(), other._flags(), strict=True))

    def _storage(self) -> tuple[int, bool]:
        return (int(getattr(mx, self.dtype).size), self.bits > 0)

    def _flags(self) -> tuple[bool, ...]:
        return (self.window > 0, self.softcap, self.sinks, self.padded)

    def _sizes(self) -> tuple[float, ...]:
        seen, streams = min(self.window or self.key_len, self.key_len), self.batch_size * self.kv_heads
        sizes = (self.query_len, seen, self.key_len, self.head_dim, self.heads / self.kv_heads, streams, self.bits)
        return tuple(max(1, size) for size in sizes)  # a call may be empty


@dataclass
class Measured:
    """seconds and peak bytes of one call, by kernel; MLX's own among them if it can."""

    call: Call
    seconds: dict[str, float]
    bytes: dict[str, int]

    def fastest(self, usual: str | None = None) -> str:
        """Of our kernels; the usual one, if it was measured, unless another takes a tenth less."""
        best = min((name for name in self.seconds if name != MLX), key=self.seconds.__getitem__)
        is_close = usual in self.seconds and self.seconds[best] > 0.9 * self.seconds[usual]
        return usual if usual and is_close else best

    def is_worth_it(self, kernel: str | None = None) -> bool:
        """Whether flash attention, by this kernel, is faster than MLX's own, or needs less than half of the memory."""
        if MLX not in self.seconds:
            return True
        ours = kernel if kernel and kernel in self.seconds else self.fastest()
        saves = self.bytes[MLX] > max(2 * self.bytes[ours], _LITTLE)
        return self.seconds[ours] < self.seconds[MLX] or saves


_TYPES = {each.name: {"str": str, "int": int, "bool": bool}[str(each.type)] for each in fields(Call)}


class TableWarning(UserWarning):
    """The table of `mlxlm-flash tune` cannot be read; the text says which file, and why."""


def preferred(arguments: _ext.Arguments, device: mx.Device, usual: str) -> str:
    """The kernel that was the fastest for such calls, asked by C++; empty where nothing was measured, or not the usual
    one, which may be newer than the table."""
    table = here(device)
    found = nearest(table, call_of(arguments)) if table else None
    return found.fastest(usual) if found and usual in found.seconds else ""


def call_of(arguments: _ext.Arguments) -> Call:
    """That these are the arguments of."""
    dtype, head_dim, _, _, query_len, given, bits, _ = arguments.kind()
    batch_size, heads, kv_heads, key_len, window = arguments.sizes()
    padded = any(name in given for name in ("key_start", "key_stop", "tree", "visible", "bias"))
    flags = {"softcap": "softcap" in given, "sinks": "sinks" in given, "padded": padded}
    sizes = (heads, kv_heads, head_dim, query_len, key_len, batch_size, window)
    return Call(str(dtype).removeprefix("mlx.core."), *sizes, **flags, bits=bits)


_tables: dict[str, list[Measured]] = {}


def here(device: mx.Device) -> list[Measured]:
    """What counts on this device, read once. A user's table that cannot be read does not, which is said."""
    name = str(device)
    if name not in _tables:
        try:
            _tables[name] = known(device)
        except ValueError as error:
            warnings.warn(f"{error}. Until then kernels are chosen without it", TableWarning, stacklevel=2)
            _tables[name] = brought(device)
    return _tables[name]


def known(device: mx.Device) -> list[Measured]:
    """The user's table, and of other calls the one that the package brings. Raises ValueError as read() does."""
    own = read(device)
    calls = {each.call for each in own}
    return own + [each for each in brought(device) if each.call not in calls]


def forget() -> None:
    """What has been read: there may be another table by now."""
    _tables.clear()


def brought(device: mx.Device) -> list[Measured]:
    """The package's own table of such a device and these versions; empty where it has none."""
    for file in sorted(_BROUGHT.glob("*.json")):
        table = json.loads(file.read_text())
        if _is_of(table, device):
            return _rows(table)
    return []


def _is_of(table: Mapping[str, Any], device: mx.Device) -> bool:
    return {name: table[name] for name in software(device)} == software(device)


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
    unfinished = path().with_suffix(f".{os.getpid()}")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.write_text(in_json(measured, device))
        return unfinished.replace(path())
    finally:
        unfinished.unlink(missing_ok=True)
        forget()


def in_json(measured: Iterable[Measured], device: mx.Device) -> str:
    """The table as it is kept: a call a line."""
    head = "".join(f" {json.dumps(name)}: {json.dumps(what)},\n" for name, what in software(device).items())
    rows = ",\n".join(f"  {json.dumps(asdict(each))}" for each in measured)
    return f'{{\n{head} "calls": [\n{rows}\n ]\n}}\n'


def read(device: mx.Device) -> list[Measured]:
    """The user's, of this device and these versions; empty if there is none. Raises ValueError for what is none."""
    try:
        text = path().read_text()
    except (OSError, LookupError):
        return []
    except UnicodeDecodeError as error:
        raise ValueError(_no_table(error)) from error
    try:
        table = json.loads(text)
        return _rows(table) if _is_of(table, device) else []
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(_no_table(error)) from error


def _no_table(error: Exception) -> str:
    return f"{path()} is no table of mlxlm-flash tune, delete it: {error!r}"


def _rows(table: Mapping[str, Any]) -> list[Measured]:
    rows = [Measured(Call(**each["call"]), each["seconds"], each["bytes"]) for each in table["calls"]]
    kernels = {MLX}.union(*map(_ext.kernels, ("cpu", "metal", "cuda")))
    for row in rows:
        if wrong := [name for name, type_ in _TYPES.items() if not isinstance(getattr(row.call, name), type_)]:
            raise ValueError(f"{wrong[0]} is {getattr(row.call, wrong[0])!r}, expected {_TYPES[wrong[0]].__name__}")
        if not isinstance(getattr(mx, row.call.dtype, None), mx.Dtype):
            raise ValueError(f"dtype is {row.call.dtype!r}, expected one of MLX's")
        if unknown := row.seconds.keys() - kernels:
            raise ValueError(f"{unknown} is no kernel")
    return rows


def nearest(table: Iterable[Measured], call: Call) -> Measured | None:
    """What was measured and is most like the call; None where nothing tells about it."""
    with_ours = (each for each in table if each.seconds.keys() - {MLX})  # or all of our kernels have failed there
    best = min(with_ours, key=lambda each: each.call.distance(call), default=None)
    return None if best is None or best.call.distance(call) == inf else best
