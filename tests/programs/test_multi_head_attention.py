"""MLX's layers give equal results with flash attention: nn.MultiHeadAttention, and nn.Transformer, which uses it."""

import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
import pytest
from mlx.utils import tree_flatten


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    flash.disable()


def off_and_on(run):
    """The arrays that `run` returns without flash attention and with it, and which kernels ran."""
    off = dict(tree_flatten({"result": run()}))
    mx.eval(off)
    flash.enable(strict=True)
    on = dict(tree_flatten({"result": run()}))
    mx.eval(on)
    kernels = flash.status().calls
    flash.disable()
    return off, on, kernels


def assert_same(off, on):
    assert off.keys() == on.keys()
    for name in off:
        assert mx.abs(off[name] - on[name]).max() <= 1e-5 * mx.abs(off[name]).max(), name


def causal(length):
    return nn.MultiHeadAttention.create_additive_causal_mask(length)


@pytest.mark.parametrize("masked", [False, True])
def test_a_layer(masked):
    layer, x = nn.MultiHeadAttention(96, 4), mx.random.normal((2, 50, 96), key=mx.random.key(0))
    off, on, kernels = off_and_on(lambda: layer(x, x, x, causal(50) if masked else None))
    assert_same(off, on)
    assert kernels == {"cpu_prefill": 1}


def test_a_transformer():
    """Two encoder layers have self-attention; two decoder layers have that and cross-attention."""
    model = nn.Transformer(dims=64, num_heads=4, num_encoder_layers=2, num_decoder_layers=2, mlp_dims=96)
    model.eval()
    source, target = (mx.random.normal((2, length, 64), key=mx.random.key(length)) for length in (40, 30))
    off, on, kernels = off_and_on(lambda: model(source, target, None, causal(30), None))
    assert_same(off, on)
    assert kernels == {"cpu_prefill": 2 + 2 * 2}


def test_a_step_of_training():
    """The gradients of all parameters agree."""
    layer, x = nn.MultiHeadAttention(96, 4, bias=True), mx.random.normal((2, 50, 96), key=mx.random.key(0))
    # The exact gradient of the keys' bias is zero: only rounding errors would be compared.
    layer.key_proj.freeze(keys=["bias"])
    step = nn.value_and_grad(layer, lambda layer: layer(x, x, x, causal(50)).square().mean())
    off, on, kernels = off_and_on(lambda: step(layer))
    assert_same(off, on)
    assert kernels == {"cpu_prefill": 1, "cpu_backward": 1}
