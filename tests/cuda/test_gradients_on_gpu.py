"""The gradient on a GPU passes the gradient tests of the core and those of tests/metal/test_backward.py."""

from dataclasses import fields

import mlx.core as mx
import pytest

from tests.core import test_gradients as of_core
from tests.core.gradient_oracle import Gradients, draw_call, flash_gradients
from tests.core.test_grid import mask_kinds, option_kinds
from tests.metal import test_backward as of_kernels

pytestmark = pytest.mark.usefixtures("requires_gpu")


@pytest.fixture(autouse=True)
def through_cuda(monkeypatch):
    """Makes the tests run flash_gradients() on MLX's default device. Only the emulator needs `schedule`."""
    monkeypatch.setattr(of_kernels, "run", lambda call, schedule="": flash_gradients(call))
    monkeypatch.setattr(of_kernels, "behind_a_forward", flash_gradients)


OF_THE_CPU = {
    "test_16_bit_gradients_are_those_of_float32_rounded_once",  # on CUDA, they may be the neighbouring 16-bit numbers
    "test_scores_are_rounded_as_by_the_forward_kernel",  # names CPU kernels
}
OF_THE_HARNESS = {
    "test_behind_a_forward_kernel",
    "test_head_dims_above_256_are_refused",
    "test_hidden_tiles_are_left_out",
    "test_saved_results_of_any_strides",
    "test_shown_tiles_read_no_mask",
    "test_the_schedule_changes_no_bit",
}
globals().update(
    (f"{name}__of_{of}", test)
    for of, module, but in (("the_core", of_core, OF_THE_CPU), ("kernels", of_kernels, OF_THE_HARNESS))
    for name, test in vars(module).items()
    if name.lower().startswith("test") and name not in but
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_again(rng, dtype, dim):
    """Gradients must have the same bits whether MLX evaluates them alone or together with other gradients.

    The kernels of gradients that are evaluated together may run at the same time.
    """
    calls = [
        of_core.with_options(
            draw_call(rng, batch=(2,), heads=6, kv_heads=2, length=length, key_len=330, dim=dim, dtype=dtype),
            mask_kinds(rng, length, 330)[turn](),
            option_kinds(rng, 6)[turn],
        )
        for turn, length in enumerate((330, 70, 1, 257))
    ]
    alone = [arrays(flash_gradients(call)) for call in calls]
    mx.eval(alone)
    for _ in range(5):
        together = [arrays(flash_gradients(call)) for call in calls]
        mx.eval(together)
        for got, expected in zip(together, alone, strict=True):
            of_core.assert_equal(got, expected)


def arrays(gradients: Gradients) -> list[mx.array]:
    found = (getattr(gradients, field.name) for field in fields(Gradients))
    return [array for array in found if array is not None]
