"""The CUDA kernels of the gradient, run on the CPU, pass the tests of tests/metal/test_backward.py."""

from dataclasses import replace

import mlx.core as mx
import pytest

from tests import launches
from tests.core import gradient_oracle, test_gradients
from tests.core.array_cases import hiding_most
from tests.core.gradient_oracle import draw_call
from tests.cuda import cuda_attention
from tests.cuda.cuda_attention import run_backward as run
from tests.metal import metal_backward
from tests.metal import test_backward as rules
from tests.promises import promise

pytestmark = [pytest.mark.rotate(40), pytest.mark.usefixtures("requires_clang")]


@pytest.fixture(autouse=True, params=[(227, 90), (227, 100), (99, 89)], ids=["9.0", "10.0", "8.9"])
def through_cuda(request, monkeypatch):
    """Runs each test for three GPUs. `request.param`: (KiB of shared memory per block, compute capability * 10)."""
    for module in (gradient_oracle, test_gradients):
        monkeypatch.setattr(module, "flash_gradients", run)
    monkeypatch.setattr(rules, "run", run)
    with launches.shared_memory(*request.param):
        yield


OF_METAL = {  # tests that name Metal's kernels or count their work; two of them have versions for CUDA below
    "test_head_dims_above_256_are_refused",
    "test_behind_a_forward_kernel",
    "test_hidden_tiles_are_left_out",
    "test_shown_tiles_read_no_mask",
}
globals().update(
    {name: test for name, test in vars(rules).items() if name.lower().startswith("test") and name not in OF_METAL}
)


@promise("CUDA's gradients agree with float64")
@pytest.mark.parametrize("form", ["", "_rounded"])
def test_behind_a_forward_kernel(rng, form):
    rules.assert_right_behind(rng, f"cuda_prefill{form}", cuda_attention.run, rounds=form == "_rounded")


@promise("CUDA's gradients leave hidden tiles out")
def test_hidden_tiles_are_left_out(rng):
    call = draw_call(rng, heads=1, kv_heads=1, length=512, key_len=512, dim=64, dtype="float16")

    def read(call):
        # backward_delta reads no tiles.
        counts = run(call).counts.items()
        return sum(each.device_read for name, each in counts if name.startswith("backward") and "delta" not in name)

    everything = read(call)
    for mask in hiding_most(512, mx.float16):
        assert read(replace(call, mask=mask)) < 0.5 * everything


@pytest.mark.parametrize(
    ("dtype", "dim", "kernel"),
    [
        ("float", 128, "parts_float"),
        ("float", 136, "float"),
        ("half", 128, "hopper_half"),
        ("half", 136, "parts_half"),
        ("bfloat", 132, "bfloat"),
    ],
)
def test_which_kernels_run_on_hopper(rng, request, dtype, dim, kernel):
    """Kernels for Hopper must run for float32 up to head_dim 128, and for 16-bit rows that the TMA can read."""
    name = {"float": "float32", "half": "float16", "bfloat": "bfloat16"}[dtype]
    call = draw_call(rng, heads=2, length=20, key_len=6, dim=dim, dtype=name)
    functions = [launch["function"] for launch in metal_backward.described(call, device="cuda")]
    wanted = kernel if "9.0" in request.node.name else dtype
    assert len([each for each in functions if each.startswith(f"cuda_backward_{wanted}_")]) in (2, 3)
