"""`flash-eval kernels --kv-bits`: quantised keys and values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import implementations
from flash_evals.implementations import IMPLEMENTATIONS
from flash_evals.workload import Heads, Workload
from flashattn_core.reference import reference_attention
from kernel_cases import mask_of, workload

pytestmark = pytest.mark.usefixtures("quick_machine")


def test_quantised_keys_and_values_are_packed() -> None:
    """A scale and a bias in the dtype for each 64 of them."""
    plain, packed = workload(heads=Heads(4, 2, 128)), workload(heads=Heads(4, 2, 128), kv_bits=4)
    rows = 2 * 4 * 32 * 128 * 4 + 4 * 4 * 32
    assert plain.bytes_read == 2 * 2 * 32 * 128 * 4
    assert packed.bytes_read == 2 * 2 * 32 * (128 // 2 + 2 * 2 * 4)
    assert packed.bytes_held - rows == packed.bytes_read
    assert "4-bit keys and values" in str(packed)


@pytest.mark.parametrize("name", implementations.QUANTISED)
@pytest.mark.parametrize("work", [workload(), workload(causal=False), workload(window=7, query_len=9)], ids=str)
def test_quantised_outputs(name: str, work: Workload) -> None:
    work = replace(work, heads=Heads(4, 2, 64), kv_bits=8)
    inputs = work.inputs(0)
    contestant = IMPLEMENTATIONS[name](work, inputs)
    (output,) = contestant.as_numpy(contestant.run([contestant.prepare() for _ in range(3)]))
    query, *others = inputs[:3]
    floats = (mx.dequantize(*mx.quantize(mx.array(x), 64, 8), group_size=64, bits=8) for x in others)
    expected, _ = reference_attention(query, *map(np.array, floats), None, mask_of(work))
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_quantised_beside_plain(run_kernels: Callable[..., tuple[list[dict[str, Any]], str]]) -> None:
    entries, page = run_kernels("--shape", "4/2x64", "--kv-bits", "none,8", "--impl", "flash,mlx,naive")
    found = [(entry["config"]["kv_bits"], entry["config"]["impl"]) for entry in entries]
    assert found == [(None, "flash"), (None, "mlx"), (None, "naive"), (8, "flash"), (8, "mlx")]
    assert "float32, 8-bit K/V" in page
