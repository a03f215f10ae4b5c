"""A function given to observe() sees attention calls, with the patch off or on. It does not change their results."""

from contextlib import nullcontext

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import qwen2

from tests.patch.model_configs import config, random_model


@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize("arm", [flash.enabled, nullcontext])
@pytest.mark.parametrize(
    ("model_type", "calls"),
    [
        ("qwen2", 2),  # both layers call mlx-lm's function
        ("plamo2", 1),  # one layer calls MLX's function, and the other has no attention
        ("gear", 2),  # both layers call a function of gear's module
        ("phi3small", 2),  # one layer calls a function of its class, and the other mlx-lm's function
        ("gemma2", 0),  # one function computes projections and attention, so observe() cannot wrap attention alone
    ],
)
def test_calls_that_are_seen(model_type, calls, arm):
    """The observer of each of two blocks gets every call and its result. The logits stay the same, bit for bit."""
    model, seen = random_model(model_type, config(model_type)), []

    def observer(attention, *arguments, **others):
        seen.append(attention(*arguments, **others))
        return seen[-1]

    with arm():
        plain = model(mx.arange(12)[None])
        with flash.observe(observer), flash.observe(observer):
            watched = model(mx.arange(12)[None])
    assert len(seen) == 2 * calls
    assert all(output.shape[2] == 12 for output in seen)
    assert mx.array_equal(watched, plain)


def test_an_import_in_the_block(late):
    """The function that calls the observer is no other library's."""
    with flash.enabled():
        names = set(flash.status().patched)
        with flash.observe(lambda *_: None):
            late("gemma2")
            assert set(flash.status().patched) == names
            assert flash.status().foreign == {}


def test_an_error_leaves_nothing_behind():
    held = qwen2.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), flash.observe(lambda *_: None):
        1 / (qwen2.scaled_dot_product_attention is held)
    assert qwen2.scaled_dot_product_attention is held
