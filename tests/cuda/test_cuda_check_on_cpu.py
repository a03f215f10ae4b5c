"""The check that a kernel must pass finds no fault in the CUDA kernels, and finds planted faults."""

import mlx.core as mx
import pytest
from flashattn_core._ext import checked_lengths
from flashattn_core.drawn import Kind

from tests.checked_kinds import GIVEN, MANY_KEYS, does_not_compile, found, kind, nan_where, quantised, wrong_where
from tests.cuda.cuda_attention import run

pytestmark = [pytest.mark.rotate(6), pytest.mark.usefixtures("requires_clang")]

DECODE, PREFILL, HOPPER, ROWWISE = KERNELS = ["cuda_decode", "cuda_prefill", "cuda_prefill_hopper", "cuda_rowwise"]
LENGTHS = {DECODE: 4, PREFILL: 77, HOPPER: 77, ROWWISE: 77}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_found(kernel, given):
    assert found(run, kernel, kind(LENGTHS[kernel], given)) == ""


OTHER_KINDS = {
    "float32, one query": (DECODE, kind(1, "causal", mx.float32, head_dim=128, value_dim=96)),
    "float32": (PREFILL, kind(77, "causal", mx.float32, head_dim=80, value_dim=40)),
    "float32 in parts": (HOPPER, kind(77, "causal", mx.float32, head_dim=80, value_dim=40)),
    "bfloat16, a wide head": (HOPPER, kind(77, "causal", mx.bfloat16, head_dim=256, value_dim=256, group=1)),
    "rounded probabilities": ("cuda_prefill_rounded", kind(77, "causal")),
    "rounded probabilities, bfloat16": ("cuda_prefill_hopper_rounded", kind(77, "causal", mx.bfloat16)),
    "4 bits": (DECODE, quantised(2, bits=4)),
    "4 bits, many queries": (PREFILL, quantised(77, bits=4)),
    "6 bits": (ROWWISE, quantised(77, bits=6)),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_nothing_is_found_in_other_kinds(name):
    assert found(run, *OTHER_KINDS[name]) == ""


def test_nothing_is_found_in_many_rows_with_slopes():
    given = {"alibi_slopes": mx.float32, "bias": mx.float32}
    many = [pair for pair in checked_lengths if pair[0] > 128]
    assert found(run, PREFILL, Kind(mx.float32, 128, 128, 2, 77, given), lengths=many) == ""


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_percent_in_a_head_is_found(kernel):
    wrong = found(run, kernel, kind(LENGTHS[kernel], "causal"), wrong_where("head == 1 && batch == 1"))
    assert "out is wrong in" in wrong


NAN = {
    DECODE: nan_where("position.query == params.query_len - 1", "merged.slice.columns[i] * "),
    PREFILL: nan_where("query >= params.query_len - 3", "out_row(params, batch, head, query), h, "),
    HOPPER: nan_where("query >= params.query_len - 3", "out_row(params, batch, head, query), h, "),
}


@pytest.mark.parametrize("kernel", NAN)
def test_nan_in_the_last_tile_is_found(kernel):
    assert "out is wrong in" in found(run, kernel, kind(LENGTHS[kernel]), NAN[kernel])


def test_rounded_probabilities_are_found_where_they_are_not_asked_for():
    other = {"cuda_prefill": "cuda_prefill_rounded"}

    def rounds(*, kernel, **arguments):
        return run(kernel=other[kernel], **arguments)

    assert "out is wrong in" in found(rounds, PREFILL, kind(77))


def test_what_does_not_compile_is_found():
    assert "this is no text" in found(run, PREFILL, kind(77), does_not_compile)


def test_what_is_wrong_for_more_keys_than_are_tried_is_not_found():
    assert f"{MANY_KEYS} keys" in found(run, DECODE, kind(1), wrong_where(f"params.key_len >= {MANY_KEYS}"))
    assert found(run, DECODE, kind(1), wrong_where(f"params.key_len > {MANY_KEYS}")) == ""
