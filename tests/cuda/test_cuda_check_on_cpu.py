"""flashattn-core checks kernels before it uses them. This check accepts the CUDA kernels and finds planted faults."""

import mlx.core as mx
import pytest
from flashattn_core import _ext
from flashattn_core._ext import checked_lengths

from tests.checked_kinds import call, found, nan_where, quantised, rules
from tests.cuda.cuda_attention import run

pytestmark = [pytest.mark.rotate(6), pytest.mark.usefixtures("requires_clang")]

DECODE, PREFILL, HOPPER, ROWWISE = "cuda_decode", "cuda_prefill", "cuda_prefill_hopper", "cuda_rowwise"
LENGTHS = {DECODE: 4, PREFILL: 77, HOPPER: 77, ROWWISE: 77}
OTHER_KINDS = {
    "float32, one query": (DECODE, call(1, "causal", mx.float32, head_dim=128, value_dim=96)),
    "float32": (PREFILL, call(77, "causal", mx.float32, head_dim=80, value_dim=40)),
    "float32 in parts": (HOPPER, call(77, "causal", mx.float32, head_dim=80, value_dim=40)),
    "bfloat16, a wide head": (HOPPER, call(77, "causal", mx.bfloat16, head_dim=256, value_dim=256, group=1)),
    "rounded probabilities": ("cuda_prefill_rounded", call(77, "causal")),
    "rounded probabilities, bfloat16": ("cuda_prefill_hopper_rounded", call(77, "causal", mx.bfloat16)),
    "4 bits": (DECODE, quantised(2, bits=4)),
    "4 bits, many queries": (PREFILL, quantised(77, bits=4)),
    "6 bits": (ROWWISE, quantised(77, bits=6)),
}
NAN = {
    DECODE: nan_where("position.query == params.query_len - 1", "merged.slice.columns[i] * "),
    PREFILL: nan_where("query >= params.query_len - 3", "out_row(params, batch, head, query), h, "),
    HOPPER: nan_where("query >= params.query_len - 3", "out_row(params, batch, head, query), h, "),
}
globals().update(rules(run, DECODE, PREFILL, LENGTHS, OTHER_KINDS, NAN))


def test_nothing_is_found_in_many_rows_with_slopes():
    given = {"alibi_slopes": mx.float32, "bias": mx.float32}
    many = [pair for pair in checked_lengths if pair[0] > 128]
    assert found(run, PREFILL, _ext.Call(mx.float32, 128, heads=2, query_len=77, given=given), lengths=many) == ""


def test_rounded_probabilities_are_found_where_they_are_not_asked_for():
    def run_rounded(*, kernel, **arguments):
        return run(kernel=f"{kernel}_rounded", **arguments)

    assert "out is wrong in" in found(run_rounded, PREFILL, call(77))
