"""Every kernel's source also compiles with address spaces as in Metal: no pointer changes its address space."""

import mlx.core as mx
import pytest
from flashattn_core.arguments import lowered

from tests import launches
from tests.core.gradient_oracle import draw_call
from tests.core.oracle import DTYPES
from tests.emulators.metal_on_cpu import AddressSpaceError, check_address_spaces
from tests.metal.metal_backward import described
from tests.metal.test_metal_kernels import CASES, QUANTISED


def sources(kernel, length, group, dtype, dim=64, bits=None):
    query, key = mx.zeros((1, group, length, dim), DTYPES[dtype]), mx.zeros((1, 1, 300, dim), DTYPES[dtype])
    key = key if bits is None else mx.quantize(key, bits=bits)
    arguments = lowered(query, key, key, kernel=kernel, group_size=64, bits=bits)
    return [launch["source"] for launch in launches.forward(arguments)]


@pytest.mark.rotate(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "bits"), [*((kernel, None) for kernel in CASES), *((k, 4) for k in QUANTISED)])
def test_kernels(kernel, bits, dtype):
    lengths = {"metal_decode_split": (1, 8), "metal_prefill_reg": (60, 70), "metal_prefill_tg": (1, 16)}
    for length in lengths.get(kernel, (1,)):
        for source in sources(kernel, length, 7, dtype, bits=bits):
            check_address_spaces(source)


def test_wide_queries_that_are_not_kept_in_registers():
    for source in sources("metal_prefill_reg", 70, 1, "float32", dim=256):
        check_address_spaces(source)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(rng, dtype, dim):
    for launch in described(draw_call(rng, length=70, key_len=70, dim=dim, dtype=dtype)):
        check_address_spaces(launch["source"])


def test_a_mistake_is_noticed():
    (source,) = sources("metal_prefill_reg", 60, 1, "float32")
    wrong = source.replace("const threadgroup U* corner = tile +", "const device U* corner = tile +")
    assert wrong != source
    with pytest.raises(AddressSpaceError):
        check_address_spaces(wrong)
