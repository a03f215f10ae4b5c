"""flashattn-core checks kernels before it uses them. The check accepts the kernels of both GPUs, run on the CPU."""

import mlx.core as mx
import pytest
from flashattn_core import _ext
from flashattn_core.check.compare import come_back, failure, gradient_failure

from tests.core.gradient_oracle import Call
from tests.core.test_check import attention as on_the_cpu
from tests.emulators.metal_on_cpu import MetalError
from tests.metal import metal_attention, metal_backward

pytestmark = pytest.mark.rotate(12)

# Maps a name to a set of optional arguments: {argument: its dtype, or None if it is no array}.
GIVEN = {
    "nothing": {},
    "causal": {"causal": None},
    "window, sinks and soft-cap": {"causal": None, "window": None, "softcap": None, "sinks": mx.float16},
    "ranges and slopes": {"key_start": mx.int32, "key_stop": mx.int32, "alibi_slopes": mx.float32},
    "a tree": {"tree": mx.uint32},
    "arrays": {"visible": mx.bool_, "bias": mx.float16},
}
LENGTHS = {"metal_decode_fast": 1, "metal_decode_parallel": 1, "metal_decode_split": 4, "metal_prefill_tg": 33}
LENGTHS |= {"metal_prefill_reg": 77, "metal_rowwise": 77, "cuda_decode": 4, "cuda_prefill": 77, "cuda_rowwise": 77}
LENGTHS |= {"cuda_prefill_hopper": 77, "cuda_prefill_rounded": 77, "cuda_prefill_hopper_rounded": 77}


def call(query_len, given, dtype=mx.float16, **sizes):
    return _ext.Call(dtype, heads=2, query_len=query_len, given=GIVEN[given], **{"head_dim": 64, **sizes})


def quantised(query_len, bits):
    given = dict.fromkeys(("key_scales", "key_biases", "value_scales", "value_biases"), mx.float16)
    return _ext.Call(mx.float16, 64, heads=2, query_len=query_len, given=given, bits=bits, group_size=32)


CASES = [(kernel, call(length, given)) for kernel, length in LENGTHS.items() for given in GIVEN]
CASES += [
    (kernel, call(LENGTHS[kernel], "causal", mx.float32, head_dim=80, value_dim=40))
    for kernel in ("metal_decode_split", "metal_prefill_reg", "cuda_decode", "cuda_prefill", "cuda_prefill_hopper")
]
CASES += [(kernel, quantised(2, 4)) for kernel in ("metal_decode_split", "cuda_decode")]
CASES += [
    ("metal_prefill_reg", quantised(77, 6)),
    ("cuda_rowwise", quantised(77, 6)),
    ("cuda_prefill", quantised(77, 4)),
    ("cuda_prefill_hopper_rounded", quantised(77, 3)),
]


def name(case):
    """The name of a kernel, or what is unlike in the calls of CASES."""
    if isinstance(case, str):
        return case
    return f"{case.dtype.size * 8} bits, {case.bits} of keys, {' '.join(sorted(case.given))}"


def found(kernel, call, edit=lambda source: source):
    """What the check finds wrong with the kernel after `edit` changed its source. Lengths are a few tiles."""

    def attention(**arguments):
        device = kernel.partition("_")[0]
        try:
            result = metal_attention.run(**arguments, kernel=kernel, edit=edit, device=device)
        except MetalError as error:  # MLX raises RuntimeError for a GPU's errors
            raise RuntimeError(str(error)) from error
        return result.out, result.lse

    name = kernel.removesuffix("_rounded")
    variant = _ext.Variant(getattr(_ext.Kernel, name.removesuffix("_hopper")), rounds=name != kernel)
    lengths = [(call.query_len, keys) for keys in (90, 400)] if call.query_len <= 16 else [(77, 150), (64, 128)]
    return failure(call, attention, on_the_cpu, lengths, variant)


@pytest.mark.parametrize(("kernel", "call"), CASES, ids=name)
def test_nothing_is_found(kernel, call):
    assert found(kernel, call) == ""


@pytest.mark.parametrize("kernel", LENGTHS)
def test_one_percent_in_a_head_is_found(kernel):
    row_result = "return RowResult{normalise / softmax.row_sum"  # every kernel's source has this text

    def wrong(source):
        return source.replace(row_result, f"{row_result} * (head == 1 && batch == 1 ? 1.01f : 1.0f)")

    assert "out is wrong in" in found(kernel, call(LENGTHS[kernel], "causal"), wrong)


def test_what_does_not_compile_is_found():
    assert "this is no text" in found("cuda_prefill", call(77, "causal"), lambda source: f"{source}\nthis is no text\n")


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_nothing_is_found_in_gradients(device, given):
    def gradients(**arguments):
        dout, dlse = come_back(arguments)
        got = metal_backward.run(Call(**arguments, dout=dout, dlse=dlse), device=device)
        return got.dq, got.dk, got.dv

    assert gradient_failure(call(77, given), gradients, [(77, 150), (64, 128)]) == ""
