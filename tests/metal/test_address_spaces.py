"""No pointer of a Metal kernel changes its address space, in any instance of the kernels' templates."""

import mlx.core as mx
import pytest

from tests.core.gradient_oracle import draw_call
from tests.core.oracle import DTYPES
from tests.emulators.metal_on_cpu import AddressSpaceError, check_address_spaces
from tests.gpu_calls import described
from tests.metal import metal_backward
from tests.metal.test_metal_kernels import CASES, QUANTISED


def check(found):
    for launch in found:
        check_address_spaces(launch["source"])


@pytest.mark.rotate(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "bits"), [*((kernel, None) for kernel in CASES), *((k, 4) for k in QUANTISED)])
def test_kernels(kernel, bits, dtype):
    lengths = {"metal_decode_split": (1, 8), "metal_prefill_reg": (60, 70), "metal_prefill_tg": (1, 16)}
    for length in lengths.get(kernel, (1,)):
        storage = {"bits": bits, "group_size": 64} if bits else {}
        check(described(kernel, heads=7, kv_heads=1, length=length, dtype=DTYPES[dtype], mask=None, **storage))


def test_wide_queries_that_are_not_kept_in_registers():
    check(described("metal_prefill_reg", length=70, dim=256, dtype=mx.float32, mask=None))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(rng, dtype, dim):
    check(metal_backward.described(draw_call(rng, length=70, key_len=70, dim=dim, dtype=dtype)))


def test_a_mistake_is_noticed():
    [launch] = described("metal_prefill_reg", length=60, dtype=mx.float32, mask=None)
    source = launch["source"]
    wrong = source.replace("const threadgroup U* corner = tile +", "const device U* corner = tile +")
    assert wrong != source
    with pytest.raises(AddressSpaceError):
        check_address_spaces(wrong)
