"""The buffers of a launch are those that the kernel declares."""

import numpy as np
import pytest
from metal_on_cpu import Binding, BindingError
from small_kernels import compile_text, one_kernel

ARGUMENTS = """device const float* in [[buffer(0)]], device float* out [[buffer(3)]],
    constant int4& sizes [[buffer(5)]], device const float* bias [[buffer(7), function_constant(has_bias)]],
    threadgroup float* shared [[threadgroup(2)]]"""
TEXT = f"""
constant bool has_bias [[function_constant(1)]];
constant int width [[function_constant(4)]];
kernel void k({ARGUMENTS}, uint i [[thread_position_in_grid]]) {{
  shared[i] = has_bias ? bias[i] : width;
  out[i] = in[i] + shared[i] + sizes.x;
}}"""

F = np.zeros(32, np.float32)
GOOD = {0: F + 1, 3: F, 5: np.array([5, 0, 0, 0], np.int32)}


def run(buffers=GOOD, constants=None, memory=None, kernel="k"):
    return compile_text(TEXT).run(
        kernel,
        grid=(1, 1, 1),
        threadgroup=(32, 1, 1),
        buffers=buffers,
        outputs={3},
        constants=constants or {4: 10},
        threadgroup_memory=memory or {2: 128},
    )


def test_program_tells_its_kernels_and_constants():
    program = compile_text(TEXT)
    assert program.kernels == {
        "k": [
            Binding("buffer", 0, "device", "in"),
            Binding("buffer", 3, "device", "out"),
            Binding("buffer", 5, "constant", "sizes"),
            Binding("buffer", 7, "device", "bias", "has_bias"),
            Binding("threadgroup", 2, "threadgroup", "shared"),
            Binding("thread_position_in_grid", None, None, "i"),
        ]
    }
    assert program.constants == {1: ("has_bias", "bool"), 4: ("width", "int")}


def test_conditional_buffer():
    assert (run().buffers[3] == 16).all()
    assert (run(GOOD | {7: F + 2}, {1: True, 4: 10}).buffers[3] == 8).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffers": {3: F, 5: GOOD[5]}}, r"buffer 0 \(in\) is not bound"),
        ({"buffers": GOOD | {9: F}}, "unused buffer 9"),
        ({"buffers": GOOD | {7: F}}, "unused buffer 7"),
        ({"constants": {1: True}}, r"buffer 7 \(bias\) is not bound"),
        ({"buffers": GOOD | {5: np.zeros(3, np.int32)}}, r"buffer 5 \(sizes\) has 12 bytes, but the argument 16"),
        ({"constants": {2: True}}, "function constant 2 is given"),
        ({"memory": {1: 128, 2: 128}}, "unused threadgroup memory 1"),
        ({"memory": {40: 128}}, "threadgroup memory 40: indices end at 31"),
        ({"buffers": GOOD | {32: F}}, "buffer 32: indices end at 31"),
        ({"memory": {1: 128}}, r"threadgroup memory 2 \(shared\) is not bound"),
        ({"kernel": "missing"}, "no kernel 'missing'; there are: k"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(BindingError, match=message):
        run(**changes)


def test_doubly_bound():
    program = one_kernel("device float* a [[buffer(1)]], device float* b [[buffer(1)]]", "a[0] = b[0];")
    with pytest.raises(BindingError, match="buffer 1 is doubly bound: to 'a' and to 'b'"):
        program.run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={1: F})


def test_arguments_without_an_index_are_numbered_in_order():
    program = one_kernel(
        "device const float* a, device float* b, constant int& n", "b[thread_index] = a[thread_index] + n;"
    )
    done = program.run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={0: F, 1: F, 2: np.int32(3)}, outputs={1})
    assert (done.buffers[1] == 3).all()


def test_unbound_buffer_that_is_read_all_the_same():
    text = """constant bool has_bias [[function_constant(0)]];
        kernel void k(device float* out [[buffer(0)]], constant float& bias [[buffer(1), function_constant(has_bias)]],
                      uint i [[thread_position_in_grid]]) { out[i] = bias; }"""
    with pytest.raises(BindingError, match=r"buffer 1 \(bias\) is read but not bound"):
        compile_text(text).run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={0: F})


def test_unbound_reference_behind_a_condition_is_not_read():
    text = """constant bool has_bias [[function_constant(0)]];
        kernel void k(device float* out [[buffer(0)]], constant float& bias [[buffer(1), function_constant(has_bias)]],
                      uint i [[thread_position_in_grid]]) {
          for (int k = 0; k < 3; k++) out[i] += has_bias ? bias : 1.0f;
        }"""
    done = compile_text(text).run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={0: F}, outputs={0})
    assert (done.buffers[0] == 3).all()
