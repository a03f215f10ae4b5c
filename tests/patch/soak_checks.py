"""The soak's checks. Each round must restore mlx-lm's functions. Memory, objects and threads must not keep growing."""

import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash

from tests.patch.soak_work import Broken

MB = 1e6


def is_ours(value: object) -> bool:
    code = getattr(value, "__code__", None)
    names = (getattr(value, "__module__", None), type(value).__module__, code and code.co_filename)
    return any("mlxlm_flash_patch" in str(name) for name in names)


class Own:
    """Saves the unpatched sys.meta_path, and the unpatched attributes of mx.fast and mlx-lm's modules and classes."""

    def __init__(self) -> None:
        self.finders = list(sys.meta_path)
        self.held = {
            (id(owner), attribute): (owner, value)
            for owner in self._owners()
            for attribute, value in vars(owner).items()
        }

    def check(self) -> None:
        """Raises Broken if an attribute has changed since __init__(), or if any module holds an object of the patch."""
        if sys.meta_path != self.finders:
            raise Broken(f"sys.meta_path is {sys.meta_path}")
        for owner in self._owners():
            name = getattr(owner, "__qualname__", owner.__name__)
            for attribute, value in vars(owner).items():
                if is_ours(value):
                    raise Broken(f"{name}.{attribute} is the patch's")
                _, before = self.held.get((id(owner), attribute), (owner, value))
                is_submodule = value is sys.modules.get(
                    f"{name}.{attribute}"
                )  # an import may have replaced the submodule
                if value is not before and not is_submodule:
                    raise Broken(f"{name}.{attribute} is another object than before: {value}, not {before}")

    def _owners(self) -> Iterator[Any]:
        yield mx.fast
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "mlx_lm":
                yield module
                yield from (c for c in list(vars(module).values()) if isinstance(c, type) and c.__module__ == name)


def check_is_off(own: Own, classes: list[tuple[nn.Module, type]]) -> None:
    status = flash.status()
    if status.enabled or status.patched or status.instances or status.foreign:
        raise Broken(f"after switching off: {status}")
    if any(type(module) is not own_class for module, own_class in classes):
        raise Broken("a model has other classes than before patch_model()")
    own.check()


GROWTH = {  # measure -> (allowed growth per 1,000 rounds, growth that is always allowed)
    "resident memory, MB": (1.0, 4.0),  # the C library and MLX keep some freed memory
    "MLX, active, MB": (0.1, 0.1),
    "MLX, freed and kept, MB": (1.0, 32.0),  # how much is kept depends on the work of the last round
    "Python objects": (100.0, 500.0),
    "threads": (0.1, 1.0),
    "file descriptors": (0.1, 1.0),
}


def occupied() -> dict[str, float]:
    """Returns the measures of GROWTH after a garbage collection. Clears MLX's cache after measuring it."""
    gc.collect()
    kept = mx.get_cache_memory()
    mx.clear_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's function returns freed memory to the system
        trim(0)
    numbers = (
        _resident() / MB,
        mx.get_active_memory() / MB,
        kept / MB,
        len(gc.get_objects()),
        _entries("/proc/self/task", threading.active_count()),
        _entries("/proc/self/fd", 0) or _entries("/dev/fd", 0),
    )
    return dict(zip(GROWTH, numbers, strict=True))


def _resident() -> int:
    """Resident memory in bytes, without file pages, which the system drops and reloads at any time."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * resource.getpagesize()
    except FileNotFoundError:  # on macOS: ru_maxrss is the peak so far, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _entries(folder: str, otherwise: int) -> int:
    try:
        return len(os.listdir(folder))
    except FileNotFoundError:
        return otherwise


class Growth(NamedTuple):
    """A measure's medians over the second and the last quarter of the rounds, and the growth allowed between them."""

    before: float
    after: float
    allowed: float


def growth(name: str, values: Sequence[float]) -> Growth | None:
    """How a measure grew since the first quarter of the rounds, when caches fill. None for under 12 rounds."""
    quarter = len(values) // 4
    if quarter < 3:
        return None
    per_1000, in_few = GROWTH[name]
    before, after = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return Growth(before, after, max(in_few, per_1000 * 2 * quarter / 1000))
