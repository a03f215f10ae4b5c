"""The check that a kernel must pass finds no fault in the Metal kernels, and finds planted faults."""

import mlx.core as mx
import pytest
from flashattn_core.check import come_back, gradient_failure

from tests.checked_kinds import GIVEN, MANY_KEYS, does_not_compile, found, kind, nan_where, quantised, wrong_where
from tests.core.gradient_oracle import Call
from tests.metal import metal_backward
from tests.metal.metal_attention import run

pytestmark = pytest.mark.rotate(6)

FAST, PARALLEL, SPLIT = "metal_decode_fast", "metal_decode_parallel", "metal_decode_split"
TG, REG, ROWWISE = "metal_prefill_tg", "metal_prefill_reg", "metal_rowwise"
LENGTHS = {FAST: 1, PARALLEL: 1, SPLIT: 4, TG: 33, REG: 77, ROWWISE: 77}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kernel", LENGTHS)
def test_nothing_is_found(kernel, given):
    assert found(run, kernel, kind(LENGTHS[kernel], given)) == ""


OTHER_KINDS = {
    "float32, one query": (SPLIT, kind(1, "causal", mx.float32, head_dim=128, value_dim=96)),
    "float32": (REG, kind(77, "causal", mx.float32, head_dim=80, value_dim=40)),
    "bfloat16, a wide head": (REG, kind(77, "causal", mx.bfloat16, head_dim=256, value_dim=256, group=1)),
    "4 bits": (SPLIT, quantised(2, bits=4)),
    "6 bits": (REG, quantised(77, bits=6)),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_nothing_is_found_in_other_kinds(name):
    assert found(run, *OTHER_KINDS[name]) == ""


@pytest.mark.parametrize("kernel", LENGTHS)
def test_one_percent_in_a_head_is_found(kernel):
    wrong = found(run, kernel, kind(LENGTHS[kernel], "causal"), wrong_where("head == 1 && batch == 1"))
    assert "out is wrong in" in wrong


NAN = {
    PARALLEL: nan_where("batch == 1", "weight *= "),
    SPLIT: nan_where("query == params.query_len - 1", "row[column] = T(output[i] * "),
    REG: nan_where("row.query >= params.query_len - 3", "store_row<DV>(target, output, "),
}


@pytest.mark.parametrize("kernel", NAN)
def test_nan_in_the_last_tile_is_found(kernel):
    assert "out is wrong in" in found(run, kernel, kind(LENGTHS[kernel]), NAN[kernel])


def test_what_does_not_compile_is_found():
    assert "this is no text" in found(run, REG, kind(77), does_not_compile)


def test_what_is_wrong_for_more_keys_than_are_tried_is_not_found():
    assert f"{MANY_KEYS} keys" in found(run, SPLIT, kind(1), wrong_where(f"params.key_len >= {MANY_KEYS}"))
    assert found(run, SPLIT, kind(1), wrong_where(f"params.key_len > {MANY_KEYS}")) == ""


# --- The gradient -------------------------------------------------------------------------------------------


def found_in_gradients(kind, edit=lambda source: source):
    def gradients(**arguments):
        dout, dlse = come_back(arguments)
        got = metal_backward.run(Call(**arguments, dout=dout, dlse=dlse), edit=edit)
        return got.dq, got.dk, got.dv

    return gradient_failure(kind, gradients, [(77, 150), (64, 128)])


GRADIENTS = {
    "float32": kind(77, "causal", mx.float32),
    "float16": kind(77, "window, sinks and soft-cap"),
    "bfloat16": kind(77, "ranges and slopes", mx.bfloat16, head_dim=80, value_dim=40),
    "a tree": kind(77, "a tree"),
    "arrays": kind(77, "arrays"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_nothing_is_found_in_gradients(name):
    assert found_in_gradients(GRADIENTS[name]) == ""


FAULTS = {
    "dq": "store_row<D>(target, sums, ",
    "dk": "backward.dk, batch, kv_head, own_key), dk_sums, ",
    "dv": "backward.dv, batch, kv_head, own_key), dv_sums, ",
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_percent_in_a_gradient_is_found(name):
    def edit(source):
        return source.replace(FAULTS[name], FAULTS[name] + "(batch == 1 ? 1.01f : 1.0f) * ")

    assert f"{name} is wrong in" in found_in_gradients(GRADIENTS["float16"], edit)
