"""Runs the kernels of a compiled Metal source on numpy arrays."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from . import errors, toolchain
from .counts import Counts

SCHEDULES = ("forward", "reverse", "greedy", "random")


@dataclass(frozen=True)
class View:
    """A buffer whose pointer leads `offset` bytes into an array. The kernel may access the whole array."""

    array: np.ndarray
    offset: int


@dataclass(frozen=True)
class Undefined:
    """A buffer without contents: the kernel must not read elements that it has not written."""

    shape: int | tuple[int, ...]
    dtype: np.typing.DTypeLike


Buffer = np.ndarray | np.generic | bytes | View | Undefined


@dataclass(frozen=True)
class Result:
    buffers: dict[int, np.ndarray]
    """The outputs, with type and shape of the given arrays."""
    counts: Counts
    unwritten: dict[int, int] = field(default_factory=dict)
    """For each output: how many of its elements have at least one byte that the kernel did not write."""


class Program:
    """All kernels of one source."""

    remembers = True
    """Whether a launch that was made before returns its cached result. If not, it is executed again."""
    runs: ClassVar = Counter[str]()

    def __init__(self, source: str, *, include_dirs: Sequence[Path] = ()) -> None:
        self.folder = toolchain.build(source, tuple(include_dirs))
        self.kernels, self.constants = pickle.loads((self.folder / "translation").read_bytes())

    def run(
        self,
        kernel: str,
        *,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        buffers: Mapping[int, Buffer],
        outputs: Collection[int] = (),
        constants: Mapping[int, int] | None = None,
        schedule: str = "forward",
        timeout: float = 120,
    ) -> Result:
        """Runs `grid` threadgroups of `threadgroup` threads. Raises MetalError or a subclass if there is an error.

        schedule: the order in which threads run between two barriers. "forward" runs threads and threadgroups by rising
        index, "reverse" by falling index. "random:7" draws both orders with seed 7. "greedy" runs one SIMD group as far
        as possible before it starts the next SIMD group.
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
        job = [kernel, _size("grid", grid), _size("threadgroup", threadgroup), _schedule(schedule)]
        inputs, arrays = _describe(buffers, outputs, job)
        values = ";".join(f"{index}={int(value)}" for index, value in constants.items())
        return _read_results(self._said("\n".join(job) + "\n", inputs, f";{values};", timeout), arrays)

    def _said(self, job: str, inputs: list[bytes], constants: str, timeout: float) -> bytes:
        """The program's answer to a job: `done` and the results, or the name and the message of an error.

        Answers are cached in the program's folder, because the same job always has the same answer.
        """
        key = hashlib.sha256(f"{toolchain.symbolizer()}\n{constants}\n{job}".encode())
        for content in inputs:
            key.update(content)
        record = self.folder / "runs" / key.hexdigest()[:32]
        if Program.remembers and record.exists():
            Program.runs["remembered"] += 1
            return record.read_bytes()
        Program.runs["executed"] += 1
        with tempfile.TemporaryDirectory(prefix="metal-on-cpu-") as folder:
            Path(folder, "job").write_text(job)
            Path(folder, "inputs").write_bytes(b"".join(inputs))
            answer = self._execute(folder, constants, timeout)
        record.parent.mkdir(exist_ok=True)
        unfinished = record.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(answer)
        unfinished.replace(record)
        return answer

    def _execute(self, folder: str, constants: str, timeout: float) -> bytes:
        program = self.folder / "program"
        env = {**os.environ, "METAL_CONSTANTS": constants}
        try:
            done = subprocess.run(
                [program, folder], env=env, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise errors.MetalError(f"the kernel did not end within {timeout} seconds") from None
        if done.returncode == 0:
            return Path(folder, "results").read_bytes()
        name, _, message = done.stderr.partition("\n")
        if done.returncode != 3 or name not in errors.BY_NAME:
            raise errors.MetalError(f"the kernel's process ended with code {done.returncode}: {done.stderr}")
        message = re.sub(r"<pc (\w+)>", lambda match: toolchain.source_line(program, match[1]), message)
        return f"{name}\n{message}".encode()


def _size(name: str, size: Sequence[int]) -> str:
    if len(size) != 3 or min(size) < 0:
        raise errors.BindingError(f"{name} must be three sizes, not {size}")
    return " ".join(map(str, size))


def _schedule(text: str) -> str:
    name, _, seed = text.partition(":")
    if name not in SCHEDULES or bool(seed) != (name == "random"):
        raise ValueError(f"no schedule {text!r}: forward, reverse, greedy, or random:SEED")
    return f"{SCHEDULES.index(name)} {int(seed or 0) * 77 + 1}"


def _describe(
    buffers: Mapping[int, Buffer], outputs: Collection[int], job: list[str]
) -> tuple[list[bytes], dict[int, np.ndarray]]:
    """Returns the buffers' contents and the outputs' arrays. Appends a line for each buffer to `job`."""
    inputs, arrays = [], {}
    for index, buffer in sorted(buffers.items()):
        if not 0 <= index < 32:
            raise errors.BindingError(f"buffer {index}: indices end at 31")
        offset, is_undefined = 0, isinstance(buffer, Undefined)
        if isinstance(buffer, View):
            array, offset = np.asarray(buffer.array), buffer.offset
        elif isinstance(buffer, Undefined):
            array = np.empty(buffer.shape, buffer.dtype)
        elif isinstance(buffer, bytes):
            array = np.frombuffer(buffer, np.uint8)
        else:
            array = np.asarray(buffer)
        if not 0 <= offset <= array.nbytes:
            raise errors.BindingError(f"buffer {index}: offset {offset} of {array.nbytes} bytes")
        if not is_undefined:
            inputs.append(array.tobytes())
        if index in outputs:
            arrays[index] = array
        numbers = (index, array.nbytes, offset, array.itemsize, index in outputs, is_undefined)
        job.append(" ".join(str(int(number)) for number in numbers))
    return inputs, arrays


def _read_results(answer: bytes, arrays: dict[int, np.ndarray]) -> Result:
    kind, _, answer = answer.partition(b"\n")
    if kind != b"done":
        raise errors.BY_NAME[kind.decode()](answer.decode())
    report, _, contents = answer.partition(b"\n\n")
    numbers = {name: int(number) for name, number in map(str.split, report.decode().splitlines())}
    results, position = {}, 0
    for index, array in arrays.items():
        results[index] = np.frombuffer(contents, array.dtype, array.size, position).reshape(array.shape).copy()
        position += array.nbytes
    unwritten = {index: numbers.pop(f"unwritten.{index}") for index in arrays}
    return Result(results, Counts(**numbers), unwritten)
