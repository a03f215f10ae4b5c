"""gemma2, gear and phi3small compute attention with MLX's basic operations. The patch replaces this attention, too."""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import flash_attention
from mlx_lm.models.cache import BatchKVCache, KVCache

from tests.patch.arms import close, off_and_on
from tests.patch.model_configs import config, random_model


def small(model_type="gemma2", dtype=mx.float32, **changes):
    return random_model(model_type, {**config(model_type), **changes}, dtype)


def causal(length=20):
    return mx.tril(mx.ones((length, length), mx.bool_))


@pytest.mark.parametrize(
    ("model_type", "attribute", "value"),
    [
        ("gemma2", "attn_logit_softcapping", 1e6),
        ("gear", "attn_logit_softcapping", 1e6),
        ("phi3small", "blocksparse_num_local_blocks", 4),
    ],
)
def test_what_is_written_out_is_seen_in_the_logits(model_type, attribute, value, tokens):
    model, x = small(model_type), tokens(1, 100)
    off, on = off_and_on(lambda: model(x))
    assert close(on, off)
    for layer in model.layers:
        setattr(layer.self_attn, attribute, value)
    assert not close(model(x), off)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_sixteen_bits_are_float32_inside(dtype):
    """Gemma 2's 16-bit results equal, bit for bit, float32 attention whose result is rounded to 16 bits once."""
    layer, x = small(dtype=dtype).layers[0].self_attn, mx.random.normal((1, 20, 64)).astype(dtype)
    with flash.enabled(strict=True):
        on = layer(x, causal())
        mx.eval(on)

    projections = zip((layer.q_proj, layer.k_proj, layer.v_proj), (4, 2, 2), strict=True)
    heads = [project(x).reshape(1, 20, n, 16).swapaxes(1, 2) for project, n in projections]
    q, k, v = (x.astype(mx.float32) for x in (layer.rope(heads[0]), layer.rope(heads[1]), heads[2]))
    out = flash_attention(q, k, v, layer.scale, causal(), softcap=layer.attn_logit_softcapping).astype(dtype)
    assert mx.array_equal(on, layer.o_proj(out.swapaxes(1, 2).reshape(1, 20, -1)))


@pytest.mark.parametrize("model_type", ["gemma2", "gear", "phi3small"])
def test_a_call_that_falls_back_is_the_model_s_own(model_type, kernels_take):
    kernels_take(1, gradient=1)
    layer = small(model_type, mx.float16).layers[0].self_attn
    x = mx.random.normal((1, 20, 64)).astype(mx.float16)
    off = layer(x, causal())
    with flash.enabled():
        with pytest.warns(flash.FlashFallbackWarning, match="head_dim over 1") as warned:
            on = layer(x, causal())
        assert flash.status().fallbacks == {"head_dim over 1": 1}
    assert mx.array_equal(on, off)
    assert warned[0].filename.endswith(f"{model_type}.py")
    with pytest.raises(flash.FlashFallbackError), flash.enabled(strict=True):
        layer(x, causal())


def test_a_batch_with_padding(tokens):
    """Padded sequences have the same results as alone. Without the patch, mlx-lm cannot compute this batch."""
    model, padding, x = small(), [0, 5, 11], tokens(3, 20)
    cache = [BatchKVCache(padding) for _ in model.layers]
    with flash.enabled(strict=True):
        together = [model(x, cache=cache), model(x[:, :1], cache=cache)]
        mx.eval(together)
    for row, left in enumerate(padding):
        alone = [KVCache() for _ in model.layers]
        assert close(together[0][row, left:], model(x[row : row + 1, left:], cache=alone)[0])
        assert close(together[1][row], model(x[row : row + 1, :1], cache=alone)[0])
