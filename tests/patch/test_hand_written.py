"""Attention that a model writes out: gemma2's with soft-cap, gear's, phi3small's block-sparse one."""

import copy
import json
import subprocess
import sys
import threading

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import flash_attention
from mlx_lm.models import base, gear, gemma2, phi3small
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlxlm_flash_patch import hand_written, registry
from mlxlm_flash_patch.places import places
from model_configs import config

WRITTEN_OUT = {"gemma2": 2, "gear": 2, "phi3small": 1}  # in so many of the two layers
TYPES = pytest.mark.parametrize("model_type", WRITTEN_OUT)


@pytest.fixture
def small(make_model):
    """small(model_type, dtype): a small random model."""

    def make(model_type="gemma2", dtype=mx.float32, **changes):
        return make_model(model_type, {**config(model_type), **changes}, dtype)

    return make


def relative_error(one, other):
    one, other = mx.where(mx.isinf(other), 0, one), mx.where(mx.isinf(other), 0, other)
    return (mx.abs(one - other).max() / mx.abs(other).max()).item()


def calls():
    return sum(flash.status().calls.values())


@pytest.mark.parametrize("batch", [1, 3])
@TYPES
def test_without_a_cache(model_type, batch, small, tokens):
    model, x = small(model_type), tokens(batch, 20)
    off = model(x)
    with flash.enabled(strict=True):
        assert relative_error(model(x), off) < 1e-4
        assert calls() == 2


@TYPES
def test_softcap_matters(model_type, small, tokens):
    """The models have one that is low enough to be seen; phi3small has none."""
    model, x = small(model_type), tokens()
    with flash.enabled(strict=True):
        on = model(x)
        for layer in model.layers:
            layer.self_attn.attn_logit_softcapping = 1e6
        assert mx.allclose(model(x), on, rtol=1e-4, atol=1e-4) == (model_type == "phi3small")


def test_phi3small_sees_blocks(small, tokens):
    """Keys of a block that a head's pattern hides are not seen."""
    model, x = small("phi3small"), tokens(1, 100)
    off = model(x)
    with flash.enabled(strict=True):
        assert relative_error(model(x), off) < 1e-4
    for layer in model.layers:
        layer.self_attn.blocksparse_num_local_blocks = 4
    assert relative_error(model(x), off) > 1e-2


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_sixteen_bits_are_float32_inside(dtype, small):
    """Gemma2's queries, keys and values go to flash attention as they are: the bits are those of casting."""
    layer = small(dtype=dtype).layers[0].self_attn
    x, mask = mx.random.normal((1, 20, 64)).astype(dtype), mx.tril(mx.ones((20, 20), mx.bool_))
    with flash.enabled(strict=True):
        on = layer(x, mask)
        mx.eval(on)

    heads = [
        proj(x).reshape(1, 20, n, 16).swapaxes(1, 2) for proj, n in zip(projections(layer), (4, 2, 2), strict=True)
    ]
    q, k, v = layer.rope(heads[0]), layer.rope(heads[1]), heads[2]
    wide = (array.astype(mx.float32) for array in (q, k, v))
    out = flash_attention(*wide, layer.scale, mask, softcap=layer.attn_logit_softcapping).astype(dtype)
    assert mx.array_equal(on, layer.o_proj(out.swapaxes(1, 2).reshape(1, 20, -1)))


def projections(layer):
    return layer.q_proj, layer.k_proj, layer.v_proj


@TYPES
def test_a_call_that_falls_back_is_the_model_s_own(model_type, small, too_wide):
    odd = small(model_type, mx.float16).layers[0].self_attn
    x, mask = mx.random.normal((1, 20, 64)).astype(mx.float16), mx.tril(mx.ones((20, 20), mx.bool_))
    off = odd(x, mask)
    with flash.enabled():
        with pytest.warns(flash.FlashFallbackWarning, match=too_wide) as warned:
            on = odd(x, mask)
        assert flash.status().fallbacks == {too_wide: 1}
    assert mx.array_equal(on, off)
    assert warned[0].filename.endswith(f"{model_type}.py")
    with pytest.raises(flash.FlashFallbackError), flash.enabled(strict=True):
        odd(x, mask)


def test_a_batch_with_padding(small, tokens):
    """Each row of a padded batch is what it is alone; mlx-lm's own mask for it does not fit gemma2's scores."""
    model, padding = small(), [0, 5, 11]
    x = tokens(3, 20)
    cache = [BatchKVCache(padding) for _ in model.layers]
    with flash.enabled(strict=True):
        together = [model(x, cache=cache), model(x[:, :1], cache=cache)]
        mx.eval(together)
    for row, left in enumerate(padding):
        alone = [KVCache() for _ in model.layers]
        first = model(x[row : row + 1, left:], cache=alone)
        assert relative_error(together[0][row, left:], first[0]) < 1e-4
        assert relative_error(together[1][row], model(x[row : row + 1, :1], cache=alone)[0]) < 1e-4


def test_gradients(small, tokens):
    """Of a weight before attention, through it."""
    model, x = small(), tokens()

    def gradient():
        def loss(weight):
            model.layers[0].self_attn.q_proj.weight = weight
            return mx.logsumexp(model(x), axis=-1).sum()

        weight = model.layers[0].self_attn.q_proj.weight
        result = mx.grad(loss)(weight)
        model.layers[0].self_attn.q_proj.weight = weight
        return result

    off = gradient()
    with flash.enabled(strict=True):
        assert relative_error(gradient(), off) < 1e-3
        assert flash.status().calls["cpu_backward"] == 2


def test_neither_model_nor_module_is_touched(small, tokens):
    """What stands in for them lives for one call: a model may be used in several threads at once."""
    model, x = small(), tokens()
    before = {name: id(value) for name, value in vars(gemma2).items()}, str(model), model.parameters().keys()
    with flash.enabled(strict=True):
        alone = model(x).tolist()
        results = []
        threads = [threading.Thread(target=lambda: results.append(model(x).tolist())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (
            {name: id(value) for name, value in vars(gemma2).items()},
            str(model),
            model.parameters().keys(),
        ) == before
    assert results == [alone] * 4


@TYPES
def test_one_instance(model_type, small, tokens):
    model, other, x = small(model_type), small(model_type), tokens()
    off = model(x)
    flash.patch_model(model)
    assert relative_error(model(x), off) < 1e-4
    assert calls() == 2
    twin = copy.deepcopy(model)
    assert mx.array_equal(twin(x), model(x))
    before = calls()
    assert mx.array_equal(other(x), off)
    flash.unpatch_model(model)
    assert mx.array_equal(model(x), off)
    assert calls() == before


@TYPES
def test_another_text_is_refused(model_type, monkeypatch, small):
    """How these functions are exchanged is known of one version of each."""
    what = next(what for what in hand_written.HAND_WRITTEN if what.module == model_type)
    others = tuple(w for w in hand_written.HAND_WRITTEN if w is not what)
    drifted = hand_written.HandWritten(what.module, what.function, "0123456789abcdef", what.make)
    monkeypatch.setattr("mlxlm_flash_patch.patch.HAND_WRITTEN", (drifted, *others))
    monkeypatch.setattr("mlxlm_flash_patch.places.HAND_WRITTEN", (drifted, *others))
    model = small(model_type)
    for models in (None, model_type):
        with pytest.raises(
            RuntimeError, match=f"{what.function} has the fingerprint {what.source}; .* 0123456789abcdef"
        ):
            flash.enable(models)
    with pytest.raises(RuntimeError, match="0123456789abcdef"):
        flash.patch_model(model)
    assert not flash.status().patched
    with flash.enabled("qwen2"):
        assert flash.status().patched


def test_a_fingerprint_is_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "models_folder", lambda: tmp_path)
    (tmp_path / "one.py").write_text("class A:\n    def f(self):\n        return 1\n")
    (tmp_path / "two.py").write_text(
        "# elsewhere\n\nclass A:\n    def f(self):\n        return 1\n\n    def g(self): ...\n"
    )
    (tmp_path / "three.py").write_text("class A:\n    def f(self):\n        return 2\n")
    one, two, three = (registry.fingerprint.__wrapped__(module, "A.f") for module in ("one", "two", "three"))
    assert one == two != three
    assert registry.fingerprint.__wrapped__("one", "A.h") == registry.fingerprint.__wrapped__("four", "A.f") == "none"


def test_another_library_s_function_is_left_alone(monkeypatch, small, tokens):
    def theirs(self, x, mask=None, cache=None):
        return x

    monkeypatch.setattr(gemma2.Attention, "__call__", theirs)
    name = "mlx_lm.models.gemma2.Attention.__call__"
    with pytest.warns(flash.FlashFallbackWarning, match=f"{name} holds .*theirs"):
        flash.enable()
    assert list(flash.status().foreign) == [name]
    assert name not in flash.status().patched
    flash.disable()
    assert vars(gemma2.Attention)["__call__"] is theirs
    with pytest.raises(ValueError, match="no module of which"):
        flash.patch_model(small())


def test_a_function_kept_from_then_is_the_model_s_own(small, tokens):
    model, x = small(), tokens()
    off = model(x)
    with flash.enabled():
        kept = gemma2.Attention.__call__
    gemma2_own = gemma2.Attention.__call__
    gemma2.Attention.__call__ = kept
    try:
        assert mx.array_equal(model(x), off)
    finally:
        gemma2.Attention.__call__ = gemma2_own
    assert flash.status().calls == {}


MEASURE = """
import json
import mlx.core as mx, mlxlm_flash_patch as flash
from mlx_lm.models import gemma2

args = dict(hidden_size=64, num_hidden_layers=1, intermediate_size=64, num_attention_heads=8, head_dim=32,
            rms_norm_eps=1e-6, vocab_size=64, num_key_value_heads=4)

def peak(dtype, length):
    layer = gemma2.Attention(gemma2.ModelArgs("gemma2", **args))
    layer.set_dtype(dtype)
    x, mask = mx.zeros((1, length, 64), dtype), mx.tril(mx.ones((length, length), mx.bool_))
    mx.eval(layer.parameters(), x, mask)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(layer(x, mask))
    return mx.get_peak_memory() - before

found = {"off": peak(mx.float32, 1024)}
with flash.enabled(strict=True):
    for dtype in ("float32", "float16", "bfloat16"):
        found[dtype] = [peak(getattr(mx, dtype), length) for length in (2048, 4096)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def peaks():
    """Bytes of one call of gemma2's attention beyond its inputs, the mask among them; in a process of its own."""
    run = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_memory_is_linear(dtype, size, peaks):
    """At 4,096 tokens twice that of 2,048, and less than a tenth of the scores of 8 heads."""
    half, whole = peaks[dtype]
    assert whole < 2.2 * half
    assert whole < 8 * 4096 * 4096 * size / 10


def test_unpatched_it_is_not(peaks):
    assert peaks["off"] > 8 * 1024 * 1024 * 4


def test_the_places_are_named():
    with flash.enabled(["gemma2", "gear", "phi3small"]):
        own = {
            "mlx_lm.models.gemma2.Attention.__call__",
            "mlx_lm.models.gear",
            "mlx_lm.models.gear._softcap_attention",
            "mlx_lm.models.phi3small",
            "mlx_lm.models.phi3small.Attention._block_sparse_attention",
        }
        assert set(flash.status().patched) == own
    originals = {place.name: place.held for place in places()}
    assert originals["mlx_lm.models.gear._softcap_attention"] is gear._softcap_attention
    assert phi3small.scaled_dot_product_attention is base.scaled_dot_product_attention
