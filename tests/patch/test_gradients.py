"""Flash attention has no gradient yet: while one is traced the call is mlx-lm's own, and training goes on as before."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlxlm_flash_patch as flash
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import base
from mlx_lm.models.qwen2 import TransformerBlock
from mlx_lm.tuner.trainer import grad_checkpoint
from mlxlm_flash_patch.route import TRACED


def loss(model, x):
    return nn.losses.cross_entropy(model(x[:, :-1]), x[:, 1:], reduction="mean")


def train(model, x, compiled):
    """Two steps as mlx-lm's trainer makes them: the loss of each, the last gradients and the weights they lead to."""
    optimizer = optim.Adam(learning_rate=1e-3)
    state = [model.state, optimizer.state]

    def step(x):
        value, gradients = nn.value_and_grad(model, loss)(model, x)
        optimizer.update(model, gradients)
        return value, gradients

    if compiled:
        step = partial(mx.compile, inputs=state, outputs=state)(step)
    losses = []
    for _ in range(2):
        value, gradients = step(x)
        mx.eval(state, value, gradients)
        losses.append(value.item())
    return losses, dict(tree_flatten(gradients)), dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_training_is_the_same(tiny, tokens, monkeypatch, compiled, checkpointed):
    if checkpointed:
        monkeypatch.setattr(TransformerBlock, "__call__", TransformerBlock.__call__)  # is exchanged in the class
        grad_checkpoint(tiny().layers[0])
    off_losses, *off = train(tiny(), tokens(2, 20), compiled)
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="no gradient yet"):
        on_losses, *on = train(tiny(), tokens(2, 20), compiled)
    assert on_losses == off_losses
    for of_on, of_off in zip(on, off, strict=True):
        assert of_on.keys() == of_off.keys()
        assert all(mx.array_equal(of_on[name], of_off[name]) for name in of_off)
    assert flash.status().fallbacks[TRACED] >= 2
    assert flash.status().calls == {}


def test_evaluation_between_steps_is_flash(tiny, tokens):
    model, x = tiny(), tokens(2, 20)
    with flash.enabled():
        with pytest.warns(flash.FlashFallbackWarning):
            train(model, x, compiled=False)
        loss(model, x).item()
    assert flash.status().calls == {"cpu_prefill": 2}


@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_gradients_of_the_input(tiny, tokens, transform):
    attention, x = tiny().layers[0].self_attn, mx.random.normal((1, 12, 128), key=mx.random.key(0))

    def gradient():
        if transform == "grad":
            return mx.grad(lambda x: attention(x, "causal").square().sum())(x)
        return mx.vjp(lambda x: attention(x, "causal"), [x], [mx.ones(x.shape)])[1][0]

    off = gradient()
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="no gradient yet"):
        on = gradient()
    assert mx.array_equal(on, off)


@pytest.mark.parametrize("name", ["queries", "keys", "values", "mask", "sinks"])
def test_the_gradient_of_one_argument_alone(name):
    """Such as sinks that are trained in a model that is otherwise frozen."""
    shapes = {"queries": (1, 2, 5, 8), "keys": (1, 2, 5, 8), "values": (1, 2, 5, 8), "mask": (5, 5), "sinks": (2,)}
    given = {key: mx.random.normal(shape, key=mx.random.key(len(key))) for key, shape in shapes.items()}

    def gradient():
        def total(x):
            return base.scaled_dot_product_attention(**{**given, name: x}, cache=None, scale=0.3).square().sum()

        return mx.grad(total)(given[name])

    off = gradient()
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="no gradient yet"):
        on = gradient()
    assert mx.array_equal(on, off)
    assert flash.status().fallbacks == {TRACED: 1}


def test_strict(tiny, tokens):
    with pytest.raises(flash.FlashFallbackError, match="no gradient yet"), flash.enabled(strict=True):
        nn.value_and_grad(model := tiny(), loss)(model, tokens())
