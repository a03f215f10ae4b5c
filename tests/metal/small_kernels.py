"""Compiles the few lines of kernel that a test of the harness is about."""

from collections.abc import Callable, Iterable
from functools import cache, partial

from metal_on_cpu import Program, Result

PREAMBLE = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n#line 1\n"


@cache
def compile_text(text: str, *defines: str) -> Program:
    return Program(PREAMBLE + text, defines=defines)


ARGUMENTS = """uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]"""


def one_kernel(arguments: str, body: str, *defines: str) -> Program:
    """A kernel "k" with these buffers; its body knows thread_index, lane, simdgroup and group. Its lines start at 1."""
    return compile_text(_kernel("k", arguments, body), *defines)


def launcher(arguments: str, bodies: Iterable[str], body: str) -> Callable[..., Result]:
    """`run` of one of many kernels, which are compiled together: that takes hardly longer than one."""
    bodies = list(dict.fromkeys(bodies))
    text = "\n".join(_kernel(f"k{number}", arguments, each) for number, each in enumerate(bodies))
    return partial(compile_text(text).run, f"k{bodies.index(body)}")


def _kernel(name: str, arguments: str, body: str) -> str:
    return f"kernel void {name}({arguments}, {ARGUMENTS}) {{\n#line 1\n{body}\n}}"
