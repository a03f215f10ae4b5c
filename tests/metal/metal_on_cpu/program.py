"""A compiled Metal source, whose kernels run on numpy arrays."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import errors, toolchain
from .counts import Counts
from .translate import translate

SCHEDULES = ("forward", "reverse", "greedy", "random")


@dataclass(frozen=True)
class View:
    """An array that the kernel gets a pointer into, `offset` bytes from its beginning. Bounds are the array's."""

    array: np.ndarray
    offset: int


@dataclass(frozen=True)
class Undefined:
    """A buffer without contents: what the kernel reads of it before writing it is an error."""

    shape: int | tuple[int, ...]
    dtype: np.typing.DTypeLike


Buffer = np.ndarray | np.generic | bytes | View | Undefined


@dataclass(frozen=True)
class Result:
    buffers: dict[int, np.ndarray]
    """The outputs, of the type and shape that were given."""
    counts: Counts
    unwritten: dict[int, int] = field(default_factory=dict)
    """For each output: how many of its elements the kernel never wrote (in part, at least)."""


class Program:
    """All kernels of one source."""

    def __init__(
        self,
        source: str,
        *,
        name: str = "kernels",
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        defines: Sequence[str] = (),
    ) -> None:
        preprocessed = toolchain.preprocess(source, name, tuple(map(str, include_dirs)), tuple(defines))
        translation = translate(preprocessed)
        self.kernels = translation.kernels
        self.constants = translation.constants
        self._executable = toolchain.build(translation.text, tuple(defines))

    def run(
        self,
        kernel: str,
        *,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        buffers: Mapping[int, Buffer],
        outputs: Collection[int] = (),
        constants: Mapping[int, bool | int | float] | None = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        schedule: str = "forward",
        timeout: float = 120,
    ) -> Result:
        """Runs `grid` threadgroups of `threadgroup` threads; raises a MetalError of the kind of what is wrong.

        The schedules differ in who goes first between two barriers: "forward" and "reverse" in the order of the
        threads (and of the threadgroups), "greedy" one SIMD group as far as it gets, "random:7" in a new random order
        each time.
        """
        if kernel not in self.kernels:
            raise errors.BindingError(f"no kernel '{kernel}'; there are: {', '.join(sorted(self.kernels))}")
        constants = constants or {}
        for index in constants:
            if index not in self.constants:
                raise errors.BindingError(f"function constant {index} is given, but the source declares none of it")
        for index in outputs:
            if index not in buffers:
                raise errors.BindingError(f"output {index} is not among the buffers")
        for index in threadgroup_memory or {}:
            if not 0 <= index < 32:
                raise errors.BindingError(f"threadgroup memory {index}: indices end at 31")
        with tempfile.TemporaryDirectory(prefix="metal-on-cpu-") as folder:
            job = [f"kernel {kernel}", _size("grid", grid), _size("threadgroup", threadgroup), _schedule(schedule)]
            arrays = self._write_inputs(Path(folder), buffers, outputs, job)
            job += [f"threadgroup_bytes {index} {size}" for index, size in (threadgroup_memory or {}).items()]
            Path(folder, "job").write_text("\n".join(job) + "\n")
            self._execute(folder, constants, timeout)
            return _read_results(Path(folder), arrays)

    def _write_inputs(
        self, folder: Path, buffers: Mapping[int, Buffer], outputs: Collection[int], job: list[str]
    ) -> dict[int, np.ndarray]:
        """The buffers' contents, one after the other, and a line of the job for each; returns the outputs' arrays."""
        arrays = {}
        with Path(folder, "inputs").open("wb") as file:
            for index, buffer in sorted(buffers.items()):
                if not 0 <= index < 32:
                    raise errors.BindingError(f"buffer {index}: indices end at 31")
                offset = buffer.offset if isinstance(buffer, View) else 0
                if isinstance(buffer, View):
                    array = np.asarray(buffer.array)
                elif isinstance(buffer, Undefined):
                    array = np.empty(buffer.shape, buffer.dtype)
                elif isinstance(buffer, bytes):
                    array = np.frombuffer(buffer, np.uint8)
                else:
                    array = np.asarray(buffer)
                if not 0 <= offset <= array.nbytes:
                    raise errors.BindingError(f"buffer {index}: offset {offset} of {array.nbytes} bytes")
                is_undefined = isinstance(buffer, Undefined)
                if not is_undefined:
                    file.write(np.ascontiguousarray(array).tobytes())
                is_output = index in outputs
                if is_output:
                    arrays[index] = array
                numbers = (index, array.nbytes, offset, array.itemsize, is_output, is_undefined)
                job.append("buffer " + " ".join(str(int(number)) for number in numbers))
        return arrays

    def _execute(self, folder: str, constants: Mapping[int, bool | int | float], timeout: float) -> None:
        values = ";".join(f"{index}={self._number(index, value)}" for index, value in constants.items())
        try:
            done = subprocess.run(
                [self._executable, folder],
                env={**os.environ, "METAL_CONSTANTS": f";{values};"},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise errors.MetalError(f"the kernel did not end within {timeout} seconds") from None
        if done.returncode == 0:
            return
        name, _, message = done.stderr.partition("\n")
        if done.returncode != 3 or name not in errors.BY_NAME:
            raise errors.MetalError(f"the kernel's process ended with code {done.returncode}: {done.stderr}")
        message = re.sub(r"<pc (\w+)>", lambda match: toolchain.source_line(self._executable, match[1]), message)
        raise errors.BY_NAME[name](message)

    def _number(self, index: int, value: bool | int | float) -> str:
        _, type_ = self.constants[index]
        return repr(float(value)) if type_ in ("float", "half") else str(int(value))


def _size(name: str, size: Sequence[int]) -> str:
    if len(size) != 3 or min(size) < 0:
        raise errors.BindingError(f"{name} must be three sizes, not {size}")
    return f"{name} {size[0]} {size[1]} {size[2]}"


def _schedule(text: str) -> str:
    name, _, seed = text.partition(":")
    if name not in SCHEDULES or bool(seed) != (name == "random"):
        raise ValueError(f"no schedule {text!r}: forward, reverse, greedy, or random:SEED")
    return f"schedule {SCHEDULES.index(name)} {int(seed or 0) * 77 + 1}"


def _read_results(folder: Path, arrays: dict[int, np.ndarray]) -> Result:
    buffers = {}
    with Path(folder, "outputs").open("rb") as file:
        for index, array in arrays.items():
            contents = np.frombuffer(file.read(array.nbytes), array.dtype)
            buffers[index] = contents.reshape(array.shape).copy()
    unwritten: dict[int, int] = {}
    mma: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for line in Path(folder, "report").read_text().splitlines():
        key, number = line.split()
        group, _, member = key.partition(".")
        if group == "unwritten":
            unwritten[int(member)] = int(number)
        elif group == "mma":
            mma[member] = int(number)
        else:
            numbers[key] = int(number)
    return Result(buffers, Counts(mma, **numbers), unwritten)
