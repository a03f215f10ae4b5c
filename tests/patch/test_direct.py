"""Models that call mx.fast.scaled_dot_product_attention themselves: plamo2, deepseek_v41, muse_spark."""

import copy

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import flash_attention
from mlx_lm.models import deepseek_v41, muse_spark, plamo2, qwen2
from mlxlm_flash_patch.direct import StandIn, standing_in
from mlxlm_flash_patch.route import for_every_model
from model_configs import config

MODULES = pytest.mark.parametrize("module", [plamo2, deepseek_v41, muse_spark], ids=lambda m: m.__name__.split(".")[-1])


def heads(seed=0, dtype=mx.float32):
    return [mx.random.normal((1, h, 12, 16), key=mx.random.key(seed + h)).astype(dtype) for h in (4, 2, 2)]


@MODULES
def test_mx_is_another_there_and_back_again(module):
    name = module.__name__
    with flash.enabled():
        assert type(module.mx) is StandIn
        assert f"{name}.mx" in flash.status().patched
        assert qwen2.mx is mx
    assert module.mx is mx
    with flash.enabled("qwen2"):
        assert module.mx is mx


def test_all_else_is_mlx_s():
    routed_mx = standing_in(mx, for_every_model)
    assert routed_mx.array is mx.array
    assert routed_mx.fast.rms_norm is mx.fast.rms_norm
    assert routed_mx.fast.scaled_dot_product_attention is not mx.fast.scaled_dot_product_attention
    assert isinstance(routed_mx.zeros(1), routed_mx.array)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = routed_mx.no_such_thing


def test_later_changes_of_mlx_are_seen(monkeypatch):
    monkeypatch.setattr(mx, "something_new", 5, raising=False)
    assert standing_in(mx, for_every_model).something_new == 5


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


def test_a_fallback_is_counted_and_warned_about(too_wide):
    q, k, v = heads()
    with flash.enabled():
        with pytest.warns(flash.FlashFallbackWarning, match=too_wide) as warned:
            on = plamo2.mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3)
        assert flash.status().fallbacks == {too_wide: 1}
    assert warned[0].filename == __file__
    assert mx.array_equal(on, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3))


def test_strict(too_wide):
    q, k, v = heads()
    with pytest.raises(flash.FlashFallbackError, match=too_wide), flash.enabled(strict=True):
        plamo2.mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3)


def test_an_image_s_attention():
    """muse_spark's: its text's goes by the seam, and through kernels for GPUs alone."""
    layer = muse_spark.VisionAttention(muse_spark.VisionArgs(hidden_size=64, num_attention_heads=4))
    rope = muse_spark.VisionRoPE2D(head_dim=16)
    cos, sin = rope(grid_h=4, grid_w=6)
    x = mx.random.normal((24, 64))
    off = layer(x, cos=cos, sin=sin)
    with flash.enabled("muse_spark", strict=True):
        assert mx.allclose(layer(x, cos=cos, sin=sin), off, rtol=1e-4, atol=1e-5)
        assert flash.status().calls == {"cpu_prefill": 1}


@pytest.mark.parametrize("model_type", ["plamo2", "deepseek_v41"])
def test_one_instance(model_type, make_model, tokens):
    """deepseek_v41 calls it from a function of its module, not from a class."""
    make = lambda: make_model(model_type, config(model_type))  # noqa: E731
    model, other, x = make(), make(), tokens()

    def calls_of(model):
        before = sum(flash.status().calls.values())
        mx.eval(model(x, cache=model.make_cache()))
        return sum(flash.status().calls.values()) - before

    calls = {"plamo2": 1, "deepseek_v41": 2}[model_type]
    flash.patch_model(model)
    assert [calls_of(model), calls_of(other)] == [calls, 0]
    assert calls_of(copy.deepcopy(model)) == calls
    with flash.enabled():
        assert [calls_of(model), calls_of(other)] == [calls, calls]
    flash.unpatch_model(model)
    assert [calls_of(model), calls_of(other)] == [0, 0]
    assert plamo2.mx is deepseek_v41.mx is mx


def test_another_library_s_is_left_alone(monkeypatch):
    theirs = object()
    monkeypatch.setattr(plamo2, "mx", theirs)
    with pytest.warns(flash.FlashFallbackWarning, match=r"plamo2\.mx holds "):
        flash.enable()
    assert plamo2.mx is theirs
    assert list(flash.status().foreign) == ["mlx_lm.models.plamo2.mx"]
    flash.disable()
    assert plamo2.mx is theirs
