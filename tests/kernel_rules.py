"""Collects tests of tests/core that GPU kernels must pass, too. tests/metal and tests/cuda run these tests."""

import importlib
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.core import gradient_oracle, oracle

MODULES = {
    name: importlib.import_module(f"tests.core.test_{name}")
    for name in (
        "array_masks",
        "batch_and_heads",
        "dtypes",
        "hidden_nan",
        "large_scores",
        "masks",
        "options",
        "quantised",
        "rows_that_see_nothing",
        "strides",
    )
}
NOT_OF_THE_KERNELS = {
    "test_nothing_but_the_outputs_is_allocated",  # measures MLX's allocator
    "test_the_cpu_copies_views_that_begin_in_the_middle_of_an_element",  # measures MLX's allocator
    # The calls in these tests raise before a kernel is chosen.
    "test_there_is_no_gradient",
    "test_plan",
    "test_errors",
}


def rules(*but: str) -> dict[str, Callable[..., None]]:
    """Returns {unique name: test} for the tests of tests/core, except the tests named in `but`."""
    return {
        f"test_{name}__{test.removeprefix('test_')}": function
        for name, module in MODULES.items()
        for test, function in vars(module).items()
        if isinstance(function, types.FunctionType)
        and test.startswith("test_")
        and test not in {*NOT_OF_THE_KERNELS, *but}
    }


def assert_same_but_for_tensor_cores(got: mx.array, expected: mx.array) -> None:
    """Like oracle.assert_same_bits(), but before rounding to its dtype, `got` may be off by 1e-5 * max(|expected|, 1).

    Tensor cores sum and truncate in their own way. So a 16-bit result may differ in its last bit, if the number before
    rounding is nearly in the middle between two 16-bit numbers.
    """
    expected = expected.astype(mx.float32)
    error = 1e-5 * mx.maximum(mx.abs(expected), 1)
    lowest, highest = (x.astype(got.dtype) for x in (expected - error, expected + error))
    assert mx.all((lowest <= got) & (got <= highest) | mx.isnan(got) & mx.isnan(expected) | (got == expected))


def run_through(
    monkeypatch: pytest.MonkeyPatch,
    attention: Callable[..., Any],
    quantised_attention: Callable[..., Any],
    kernel_for: Callable[..., str],
    same: Callable[[mx.array, mx.array], None] | None = None,
) -> None:
    """Makes the core's tests call these functions with kernel=kernel_for(query, max(head_dim, value_dim), quantised).

    same: replaces oracle.py's assert_same_bits() and assert_same_but_for_order(). If it is None, these two stay.
    """

    def plain(query, key, value, *args, kernel="auto", **options):
        if all(isinstance(a, mx.array) and a.ndim >= 3 for a in (query, key, value)):
            kernel = kernel_for(query, max(query.shape[-1], value.shape[-1]))
        return attention(query, key, value, *args, kernel=kernel, **options)

    def quantised(query, key, value, *args, bits=8, **options):
        options["kernel"] = kernel_for(query, max(query.shape[-1], value[0].shape[-1] * 32 // bits), quantised=True)
        return quantised_attention(query, key, value, *args, bits=bits, **options)

    for module in (oracle, *MODULES.values()):
        monkeypatch.setattr(module, "flash_attention", plain, raising=False)  # test_quantised.py calls no such function
        for comparison in ("assert_same_bits", "assert_same_but_for_order"):
            if same and hasattr(module, comparison):
                monkeypatch.setattr(module, comparison, same)
    for name in ("large_scores", "quantised"):
        monkeypatch.setattr(MODULES[name], "quantized_flash_attention", quantised)
    monkeypatch.setattr(gradient_oracle, "assert_obeys_the_rule", lambda call: None)  # gradients have their own tests
