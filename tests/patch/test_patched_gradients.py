"""Training with the patch runs flash attention's gradients, and gives the same losses."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlxlm_flash_patch as flash
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import base
from mlx_lm.tuner.trainer import grad_checkpoint

from tests.patch.arms import off_and_on
from tests.patch.model_configs import config, random_model
from tests.promises import promise


def loss(model, x):
    return nn.losses.cross_entropy(model(x[:, :-1]), x[:, 1:], reduction="mean")


def train(model, x, compiled):
    """Trains for three steps, as mlx-lm's trainer does. Returns each step's loss, and the first step's gradients."""
    optimizer = optim.SGD(learning_rate=0.1)  # not Adam, which enlarges rounding errors where a gradient is nearly zero
    state = [model.state, optimizer.state]

    def step(x):
        value, gradients = nn.value_and_grad(model, loss)(model, x)
        optimizer.update(model, gradients)
        return value, gradients

    if compiled:
        step = partial(mx.compile, inputs=state, outputs=state)(step)
    results = []
    for _ in range(3):
        value, gradients = step(x)
        mx.eval(state, value, gradients)
        results.append((value.item(), gradients))
    return [value for value, _ in results], results[0][1]


def assert_close(on, off):
    """Compares the arrays of two trees."""
    for (name, a), (_, b) in zip(tree_flatten(on), tree_flatten(off), strict=True):
        assert mx.abs(a - b).max() <= 1e-4 * mx.abs(b).max() + 1e-6, name


def checkpoint(model, monkeypatch):
    """Checkpoints the model's layers, as mlx_lm.lora --grad-checkpoint does. Returns the model."""
    for layer in {type(layer): layer for layer in model.layers}.values():
        monkeypatch.setattr(type(layer), "__call__", type(layer).__call__)  # undone after the test
        grad_checkpoint(layer)
    return model


@promise("training with the patch gives the same losses, step by step")
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_training_is_the_same(tiny, tokens, monkeypatch, compiled, checkpointed):
    if checkpointed:
        checkpoint(tiny(), monkeypatch)
    (off_losses, off), (on_losses, on) = off_and_on(lambda: train(tiny(), tokens(2, 20), compiled))
    assert on_losses == pytest.approx(off_losses, rel=1e-5)
    assert_close(on, off)
    # There are two layers and three steps. Checkpointed layers run forward twice.
    assert flash.status().calls == {"cpu_prefill": 12 if checkpointed else 6, "cpu_backward": 6}


@pytest.mark.rotate(4, default=4)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize(
    "kind", ["cohere2", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "mimo_v2_flash", "olmo3", "phi3small"]
)
def test_checkpointed_layers_get_masks_as_arguments(kind, tokens, monkeypatch, compiled):
    """mlx-lm makes array masks for models with windows, and for gemma2, which does not call MLX's attention."""
    checkpoint(random_model(kind, config(kind)), monkeypatch)
    run = lambda: train(random_model(kind, config(kind)), tokens(2, 24), compiled)  # noqa: E731
    (off_losses, off), (on_losses, on) = off_and_on(run)
    assert on_losses == pytest.approx(off_losses, rel=1e-5)
    assert len(set(on_losses)) == 3
    assert_close(on, off)
    assert flash.status().calls["cpu_backward"] > 0


@pytest.mark.parametrize("name", ["queries", "keys", "values", "mask", "sinks"])
def test_the_gradient_of_one_argument_alone(name):
    """A program may train one argument alone: for example sinks, or a mask that is a positional bias, as in T5."""
    shapes = {"queries": (1, 2, 5, 8), "keys": (1, 2, 5, 8), "values": (1, 2, 5, 8), "mask": (2, 5, 5), "sinks": (2,)}
    given = {key: mx.random.normal(shape, key=mx.random.key(len(key))) for key, shape in shapes.items()}

    def total(x):
        return base.scaled_dot_product_attention(**{**given, name: x}, cache=None, scale=0.3).square().sum()

    off, on = off_and_on(lambda: mx.grad(total)(given[name]))
    assert_close([on], [off])


@pytest.mark.parametrize(("most", "where"), [(8, "on this device for a head_dim over 8"), (0, "on this device")])
@pytest.mark.parametrize("traced_by", ["grad", "compile"])
def test_where_the_gradient_has_no_kernel(traced_by, most, where, kernels_take):
    """A traced call falls back if flash attention has no gradient for it, because mx.grad may trace the call."""
    kernels_take(16, gradient=most)
    q = mx.random.normal((1, 2, 5, 16), key=mx.random.key(0))

    def total(q):
        return base.scaled_dot_product_attention(q, q, q, None, 0.3, "causal").sum()

    def traced():  # a new function each time, because MLX caches graphs by function
        return {"grad": mx.grad, "compile": mx.compile}[traced_by](lambda q: total(q))(q)

    off = traced()
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match=f"no gradient {where} "):
        assert mx.array_equal(traced(), off)
    reason = f"traced by mx.grad, mx.vmap or mx.compile: flash attention has no gradient {where}"
    assert flash.status().fallbacks == {reason: 1}
    with flash.enabled(strict=True):
        mx.eval(total(q))
