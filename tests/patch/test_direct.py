"""Models that call mx.fast.scaled_dot_product_attention themselves: plamo2, deepseek_v41, muse_spark."""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from arms import close, off_and_on
from flashattn_core import flash_attention
from mlx_lm.models import muse_spark, plamo2
from mlxlm_flash_patch.direct import standing_in
from mlxlm_flash_patch.route import for_every_model


def heads(seed=0):
    return [mx.random.normal((1, h, 12, 16), key=mx.random.key(seed + h)) for h in (4, 2, 2)]


def test_all_else_is_mlx_s(monkeypatch):
    routed_mx = standing_in(mx, for_every_model)
    assert routed_mx.array is mx.array
    assert routed_mx.fast.rms_norm is mx.fast.rms_norm
    assert routed_mx.fast.scaled_dot_product_attention is not mx.fast.scaled_dot_product_attention
    assert isinstance(routed_mx.zeros(1), routed_mx.array)
    with pytest.raises(AttributeError, match="something_new"):
        _ = routed_mx.something_new
    monkeypatch.setattr(mx, "something_new", 5, raising=False)
    assert routed_mx.something_new == 5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": "causal"},
        {"mask": mx.tril(mx.ones((12, 12), mx.bool_))},
        {"sinks": mx.arange(4.0)},
        {"force_fused": True},
        {"stream": mx.cpu},
        {"stream": mx.new_stream(mx.cpu)},
    ],
    ids=lambda options: "".join(options),
)
def test_it_takes_what_mlx_s_function_takes(options):
    q, k, v = heads()
    with flash.enabled(strict=True):
        on = plamo2.mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, **options)
        mask, sinks = options.get("mask"), options.get("sinks")
        assert mx.array_equal(on, flash_attention(q, k, v, 0.3, mask, sinks=sinks))
    unfused = {name: value for name, value in options.items() if name != "force_fused"}
    off = plamo2.mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, **unfused)
    assert mx.allclose(on, off, rtol=1e-4, atol=1e-5)


def test_a_fallback(too_wide):
    """It is MLX's own attention, counted and warned about; under strict an error."""

    def attend():
        return plamo2.mx.fast.scaled_dot_product_attention(*heads(), scale=0.3)

    off = attend()
    with flash.enabled():
        with pytest.warns(flash.FlashFallbackWarning, match=too_wide) as warned:
            assert mx.array_equal(attend(), off)
        assert flash.status().fallbacks == {too_wide: 1}
    assert warned[0].filename == __file__
    with pytest.raises(flash.FlashFallbackError, match=too_wide), flash.enabled(strict=True):
        attend()


def test_an_image_s_attention():
    """muse_spark's: its text's goes by the seam, and through kernels for GPUs alone."""
    layer = muse_spark.VisionAttention(muse_spark.VisionArgs(hidden_size=64, num_attention_heads=4))
    cos, sin = muse_spark.VisionRoPE2D(head_dim=16)(grid_h=4, grid_w=6)
    x = mx.random.normal((24, 64))
    off, on = off_and_on(lambda: layer(x, cos=cos, sin=sin), "muse_spark")
    assert close(on, off)
    assert flash.status().calls == {"cpu_prefill": 1}
