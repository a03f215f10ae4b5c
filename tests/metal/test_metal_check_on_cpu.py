"""flashattn-core checks kernels before it uses them. This check accepts the Metal kernels and finds planted faults."""

import mlx.core as mx
import pytest
from flashattn_core.check.compare import come_back, gradient_failure

from tests.checked_kinds import call, nan_where, quantised, rules
from tests.core.gradient_oracle import Call
from tests.metal import metal_backward
from tests.metal.metal_attention import run
from tests.promises import promise

pytestmark = pytest.mark.rotate(6)

FAST, PARALLEL, SPLIT = "metal_decode_fast", "metal_decode_parallel", "metal_decode_split"
TG, REG, ROWWISE = "metal_prefill_tg", "metal_prefill_reg", "metal_rowwise"
LENGTHS = {FAST: 1, PARALLEL: 1, SPLIT: 4, TG: 33, REG: 77, ROWWISE: 77}
OTHER_KINDS = {
    "float32, one query": (SPLIT, call(1, "causal", mx.float32, head_dim=128, value_dim=96)),
    "float32": (REG, call(77, "causal", mx.float32, head_dim=80, value_dim=40)),
    "bfloat16, a wide head": (REG, call(77, "causal", mx.bfloat16, head_dim=256, value_dim=256, group=1)),
    "4 bits": (SPLIT, quantised(2, bits=4)),
    "6 bits": (REG, quantised(77, bits=6)),
}
NAN = {
    PARALLEL: nan_where("batch == 1", "weight *= "),
    SPLIT: nan_where("query == params.query_len - 1", "out_row(params, batch, head, query), output, "),
    REG: nan_where("row.query >= params.query_len - 3", "store_row<DV>(target, output, "),
}
globals().update(rules(run, SPLIT, REG, LENGTHS, OTHER_KINDS, NAN))


# --- The gradient -------------------------------------------------------------------------------------------


def found_in_gradients(call, edit=lambda source: source):
    def gradients(**arguments):
        dout, dlse = come_back(arguments)
        got = metal_backward.run(Call(**arguments, dout=dout, dlse=dlse), edit=edit)
        return got.dq, got.dk, got.dv

    return gradient_failure(call, gradients, [(77, 150), (64, 128)])


GRADIENTS = {
    "float32": call(77, "causal", mx.float32),
    "float16": call(77, "window, sinks and soft-cap"),
    "bfloat16": call(77, "ranges and slopes", mx.bfloat16, head_dim=80, value_dim=40),
    "a tree": call(77, "a tree"),
    "arrays": call(77, "arrays"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_nothing_is_found_in_gradients(name):
    assert found_in_gradients(GRADIENTS[name]) == ""


FAULTS = {
    "dq": "store_row<D>(target, sums, ",
    "dk": "backward.dk, batch, kv_head, own_key), dk_sums, ",
    "dv": "backward.dv, batch, kv_head, own_key), dv_sums, ",
}


@promise("the check finds an error of one percent in a gradient")
@pytest.mark.parametrize("name", FAULTS)
def test_one_percent_in_a_gradient_is_found(name):
    def edit(source):
        return source.replace(FAULTS[name], FAULTS[name] + "(batch == 1 ? 1.01f : 1.0f) * ")

    assert f"{name} is wrong in" in found_in_gradients(GRADIENTS["float16"], edit)
