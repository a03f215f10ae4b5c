"""Compiles and runs kernels of a few lines, for the tests of the emulator."""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from tests.emulators.metal_on_cpu import Program, Result
from tests.emulators.metal_on_cpu.program import Buffer

PREAMBLE = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n#line 1\n"
OUT = "device float* out [[buffer(0)]]"
INDICES = """uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]"""
SCHEDULES = ["forward", "reverse", "greedy", "random:3"]


@cache
def compile_text(text: str) -> Program:
    return Program(PREAMBLE + text)


def run_text(text: str, kernel: str = "k", **options: Any) -> Result:
    """Runs a kernel of this source text, by default in one threadgroup of 32 threads."""
    return compile_text(text).run(kernel, **{"grid": (1, 1, 1), "threadgroup": (32, 1, 1), **options})


def run(
    body: str,
    arguments: str = OUT,
    buffers: Mapping[int, Buffer] | None = None,
    *,
    together: Iterable[str] = (),
    groups: int = 1,
    threads: int = 64,
    outputs: Collection[int] = (0,),
    **options: Any,
) -> Result:
    """Runs a kernel with this body, which may use thread_index, lane, simdgroup and group.

    In error messages, the body's first line is line 1.

    `together`: more bodies for the same program, because compiling many at once takes hardly longer than one.
    `buffers`: by default, buffer 0 with 256 zeros.
    """
    bodies = list(dict.fromkeys([*together, body]))
    kernels = [
        f"kernel void k{number}({arguments}, {INDICES}) {{\n#line 1\n{each}\n}}" for number, each in enumerate(bodies)
    ]
    return compile_text("\n".join(kernels)).run(
        f"k{bodies.index(body)}",
        grid=(groups, 1, 1),
        threadgroup=(threads, 1, 1),
        buffers=buffers or {0: np.zeros(256, np.float32)},
        outputs=outputs,
        **options,
    )
