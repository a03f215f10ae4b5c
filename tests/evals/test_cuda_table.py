"""In the scripts that measure the tables of docs/nvidia.md, flash attention and MLX give the same results."""

import measure_cuda_gradients
import measure_cuda_table
import pytest
from measure_cuda_table import PEAKED, STORED, TABLE, measured
from mlxlm_flash_patch import router
from msgspec.structs import replace


@pytest.mark.slow("minutes")
@pytest.mark.rotate(5)
@pytest.mark.parametrize("name", TABLE | STORED)
def test_both_compute_the_same(name, monkeypatch):
    monkeypatch.setattr(measure_cuda_table, "TRIAL_SECONDS", 0)

    def small(length):
        return length if length <= 16 else length // 128

    call = (TABLE | STORED)[name]
    lengths = {"query_len": small(call.query_len), "seq_len": small(call.seq_len)}
    call = replace(call, **lengths, window=call.window and 5, padding=tuple(n // 128 for n in call.padding))
    with router.active():
        found = measured(call, trials=1)
    bound = (1e-6, 1e-6) if call.dtype == "float32" else (60 if call.kv_bits else 5, 1.01)
    for errors, larger in ((found["errors"], 1), (found["peaked"], PEAKED)):
        own, ours, *default = errors
        assert own < larger * bound[0]
        assert ours < larger * bound[1]
        assert default == ([] if call.kv_bits else [ours])  # on the CPU, both precisions have the same error
    assert min(found["stream"] + found["chain"]) > 0


GRADIENTS = ("causal, batch of 4, 14/2x64, 2080²", "window 512, 28/4x128, 4096²", "float32, causal, 28/4x128, 4096²")


@pytest.mark.slow("3 seconds")
@pytest.mark.parametrize("name", [*GRADIENTS, "soft-cap 50, 8/4x256, 4096²"])
def test_both_compute_the_same_gradients(name):
    call = measure_cuda_gradients.TABLE[name]
    found = measure_cuda_gradients.measured(replace(call, query_len=33, seq_len=33, window=call.window and 5), trials=1)
    own, float32, rounded = found["errors"]
    bound = (1e-6, 1e-6) if call.dtype == "float32" else (5, 2)
    assert max(own) < bound[0]
    assert max(float32) < bound[1]
    assert rounded == float32  # on the CPU, both precisions have the same error
    assert min(found["backward"] + found["both"]) > 0
