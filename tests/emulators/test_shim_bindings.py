"""The buffers and function constants of a launch must be those that the kernel declares."""

import numpy as np
import pytest

from tests.emulators.metal_on_cpu import BindingError, CompileError
from tests.emulators.small_kernels import compile_text, run, run_text

TEXT = """
constant bool has_bias [[function_constant(1)]];
constant int width [[function_constant(4)]];
kernel void k(device const float* in [[buffer(0)]], device float* out [[buffer(3)]], constant int2& sizes [[buffer(5)]],
              device const float* bias [[buffer(7), function_constant(has_bias)]],
              uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i] + (has_bias ? bias[i] : width) + sizes.x;
}"""
F = np.zeros(32, np.float32)
GOOD = {0: F + 1, 3: F, 5: np.array([5, 0], np.int32)}


def launch(buffers=GOOD, constants=None, kernel="k", text=TEXT, outputs=(3,)):
    return run_text(text, kernel, buffers=buffers, outputs=outputs, constants=constants)


def test_program_tells_its_kernels_and_constants():
    program = compile_text(TEXT)
    assert list(program.kernels) == ["k"]
    assert program.constants == {1: ("has_bias", "bool"), 4: ("width", "int")}


def test_conditional_buffer():
    assert (launch(constants={4: 10}).buffers[3] == 16).all()
    assert (launch(GOOD | {7: F + 2}, {1: True, 4: 10}).buffers[3] == 8).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffers": {3: F, 5: GOOD[5]}}, r"buffer 0 \(in\) is not bound"),
        ({"buffers": GOOD | {9: F}}, "unused buffer 9"),
        ({"buffers": GOOD | {7: F}}, "unused buffer 7"),
        ({"constants": {1: True}}, r"buffer 7 \(bias\) is not bound"),
        ({"buffers": GOOD | {5: np.zeros(1, np.int32)}}, r"buffer 5 \(sizes\) has 4 bytes, but the argument 8"),
        ({"constants": {2: True}}, "function constant 2 is given"),
        ({"buffers": GOOD | {32: F}}, "buffer 32: indices end at 31"),
        ({"outputs": {8}}, "output 8 is not among the buffers"),
        ({"kernel": "missing"}, "no kernel 'missing'; there are: k"),
        ({"text": TEXT.replace("buffer(3)", "buffer(0)")}, "buffer 0 is doubly bound: to 'in' and to 'out'"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(BindingError, match=message):
        launch(**changes)


@pytest.mark.parametrize("argument", ["device float* a", "threadgroup float* a [[threadgroup(0)]]"])
def test_every_pointer_has_the_number_of_a_buffer(argument):
    with pytest.raises(CompileError, match=r"only pointers and references with a \[\[buffer\(n\)\]\]"):
        run("", argument)


UNBOUND = """constant bool has_bias [[function_constant(0)]];
    kernel void k(device float* out [[buffer(0)]], constant float& bias [[buffer(1), function_constant(has_bias)]],
                  uint i [[thread_index_in_threadgroup]]) {{ for (int k = 0; k < 3; k++) out[i] += {}; }}"""


def test_unbound_buffer_that_is_read():
    with pytest.raises(BindingError, match=r"buffer 1 \(bias\) is read but not bound"):
        launch({0: F}, text=UNBOUND.format("bias"), outputs=())
    behind_a_condition = launch({0: F}, text=UNBOUND.format("has_bias ? bias : 1.0f"), outputs={0})
    assert (behind_a_condition.buffers[0] == 3).all()
