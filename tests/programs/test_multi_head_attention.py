"""MLX's layers nn.MultiHeadAttention and nn.Transformer give equal results with flash attention."""

import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
import pytest
from mlx.utils import tree_flatten

from tests.patch.arms import error, off_and_on
from tests.promises import promise


def kernels_of(run):
    """Returns the kernels that run() uses with flash attention. Without it, run() must return equal arrays."""
    off, on = off_and_on(lambda: dict(tree_flatten({"result": run()})))
    assert off.keys() == on.keys()
    for name in off:
        assert error(on[name], off[name]) <= 1e-5, name
    return flash.status().calls


def causal(length):
    return nn.MultiHeadAttention.create_additive_causal_mask(length)


@promise("MLX's attention layers give the same results")
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer(masked):
    layer, x = nn.MultiHeadAttention(96, 4), mx.random.normal((2, 50, 96), key=mx.random.key(0))
    assert kernels_of(lambda: layer(x, x, x, causal(50) if masked else None)) == {"cpu_prefill": 1}


def test_a_transformer():
    """Two encoder layers have self-attention. Two decoder layers have self-attention and cross-attention."""
    model = nn.Transformer(dims=64, num_heads=4, num_encoder_layers=2, num_decoder_layers=2, mlp_dims=96)
    model.eval()
    source, target = (mx.random.normal((2, length, 64), key=mx.random.key(length)) for length in (40, 30))
    assert kernels_of(lambda: model(source, target, None, causal(30), None)) == {"cpu_prefill": 2 + 2 * 2}


@promise("MLX's attention layers give the same gradients")
def test_a_step_of_training():
    layer, x = nn.MultiHeadAttention(96, 4, bias=True), mx.random.normal((2, 50, 96), key=mx.random.key(0))
    # Freezes the keys' bias. Its exact gradient is zero, so its computed gradient has only rounding errors.
    layer.key_proj.freeze(keys=["bias"])
    step = nn.value_and_grad(layer, lambda layer: layer(x, x, x, causal(50)).square().mean())
    assert kernels_of(lambda: step(layer)) == {"cpu_prefill": 1, "cpu_backward": 1}
