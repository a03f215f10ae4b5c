"""The rules that every backend keeps: the core's own tests, run through the Metal kernels.

Three teams of kernels, so that each of the six meets each rule with the lengths it is for. All run in another schedule.
"""

import importlib
import types

import gradient_oracle
import mlx.core as mx
import oracle
import pytest
from metal_attention import flash_attention

pytestmark = pytest.mark.rotate(72)  # 3,500 cases, of which most differ in the kernels' team alone

MODULES = {
    name: importlib.import_module(f"test_{name}")
    for name in (
        "array_masks",
        "batch_and_heads",
        "dtypes",
        "hidden_nan",
        "masks",
        "options",
        "quantised",
        "rows_that_see_nothing",
        "strides",
    )
}
NOT_OF_THE_KERNELS = {
    "test_nothing_but_the_outputs_is_allocated",  # measures MLX's allocator
    # Of quantised keys and values: test_quantised_kernels.py has these two with lengths for the harness, and what
    # happens before a kernel is chosen is no kernel's.
    "test_equals_the_dequantised",
    "test_a_decode_step_equals_the_row_of_a_prefill",
    "test_transforms",
    "test_there_is_no_gradient",
    "test_plan",
    "test_plan_on_metal",
    "test_errors",
    "test_flash_attention_takes_no_tuples",
}


def fast_and_tg(length: int, dim: int) -> str:
    return "metal_decode_fast" if length <= 1 else "metal_prefill_tg" if dim <= 256 else "metal_rowwise"


def parallel_and_reg(length: int, dim: int) -> str:
    return "metal_decode_parallel" if length <= 1 else "metal_prefill_reg" if dim <= 256 else "metal_rowwise"


def split_and_rowwise(length: int, dim: int) -> str:
    return "metal_decode_split" if length <= 8 else "metal_rowwise"


TEAMS = {fast_and_tg: "reverse", parallel_and_reg: "greedy", split_and_rowwise: "random:3"}


@pytest.fixture(autouse=True, params=TEAMS, ids=lambda team: team.__name__)
def through_metal(request, monkeypatch):
    team = request.param

    def on_metal(query, key, value, *args, kernel="auto", **options):
        if all(isinstance(a, mx.array) and a.ndim >= 3 for a in (query, key, value)):
            kernel = team(query.shape[-2], max(query.shape[-1], value.shape[-1]))
        return flash_attention(query, key, value, *args, kernel=kernel, schedule=TEAMS[team], **options)

    def quantised_on_metal(query, key, value, *args, bits=8, **options):
        kernel = team(query.shape[-2], max(query.shape[-1], value[0].shape[-1] * 32 // bits))
        options["kernel"] = kernel.replace("prefill_tg", "prefill_reg")  # prefill_tg takes none
        return flash_attention(query, key, value, *args, bits=bits, schedule=TEAMS[team], **options)

    for module in (oracle, *MODULES.values()):
        monkeypatch.setattr(module, "flash_attention", on_metal)
    monkeypatch.setattr(MODULES["quantised"], "quantized_flash_attention", quantised_on_metal)
    monkeypatch.setattr(gradient_oracle, "assert_obeys_the_rule", lambda call: None)  # see test_backward.py


for _name, _module in MODULES.items():
    for _test, _function in vars(_module).items():
        if isinstance(_function, types.FunctionType) and _test.startswith("test_") and _test not in NOT_OF_THE_KERNELS:
            globals()[f"test_{_name}__{_test.removeprefix('test_')}"] = _function
