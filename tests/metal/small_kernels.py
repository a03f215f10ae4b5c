"""Compiles the few lines of kernel that a test of the harness is about."""

from functools import cache

from metal_on_cpu import Program

PREAMBLE = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n#line 1\n"


@cache
def compile_text(text: str, *defines: str) -> Program:
    return Program(PREAMBLE + text, defines=defines)


ARGUMENTS = """uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]"""


def one_kernel(arguments: str, body: str, *defines: str) -> Program:
    """A kernel "k" with these buffers; its body knows thread_index, lane, simdgroup and group. Its lines start at 1."""
    return compile_text(f"kernel void k({arguments}, {ARGUMENTS}) {{\n#line 1\n{body}\n}}", *defines)
