"""patch_model() patches the attention calls of one model. All other models in the process run as before."""

import copy
import gc
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.trainer import grad_checkpoint

from tests.patch.arms import calls_of, close
from tests.patch.model_configs import ARCHITECTURES, config, random_model
from tests.promises import promise


def arrays(model):
    return {name: array.tolist() for name, array in tree_flatten(model.parameters())}


def types_of(model):
    return [type(module) for module in model.modules()]


def calls_of_each(run, *models):
    return [calls_of(lambda model=model: run(model)) for model in models]


@pytest.fixture
def pair(tiny):
    """A patched model, and an unpatched model of the same class."""
    model = tiny()
    flash.patch_model(model)
    return model, tiny(seed=1)


@pytest.fixture
def x(tokens):
    x = tokens()
    mx.eval(x)  # evaluated here, because another thread cannot use this thread's stream
    return x


@promise("patch_model() changes this model and no other")
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize("model_type", [*ARCHITECTURES, "gemma2", "gear", "phi3small", "plamo2", "deepseek_v41"])
def test_this_model_and_no_other(model_type, x):
    """Attention is patched even if a function outside the model's classes calls it, as in deepseek_v41."""

    def make(seed=0):
        return random_model(model_type, config(model_type), seed=seed)

    def run(model):
        return model(x, cache=make_prompt_cache(model))

    model, other = make(), make(seed=1)
    off, of_other, types = run(model), run(other), types_of(model)
    flash.patch_model(model)
    assert close(run(model), off)
    on = 1 if model_type == "plamo2" else 2  # every second layer of plamo2 has no attention
    assert calls_of_each(run, model, copy.deepcopy(model), other, make()) == [on, on, 0, 0]
    assert mx.array_equal(run(other), of_other)
    with flash.enabled():
        assert calls_of_each(run, model, other) == [on, on]

    flash.unpatch_model(model)
    assert types_of(model) == types
    assert calls_of_each(run, model) == [0]
    assert mx.array_equal(run(model), off)
    assert flash.status().fallbacks == {}


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("own_again", [0, 1], ids=["the model", "the copy"])
def test_copies_are_patched_too(pair, x, again, own_again):
    both = pair[0], again(pair[0])
    assert arrays(both[0]) == arrays(both[1])
    assert mx.array_equal(both[0](x), both[1](x))
    assert calls_of_each(lambda model: model(x), *both) == [2, 2]
    flash.unpatch_model(both[own_again])
    assert calls_of_each(lambda model: model(x), both[own_again], both[1 - own_again]) == [0, 2]


def test_with_enable(pair, x):
    """A model is patched if enable() or patch_model() patches it. Undoing one of the two does not undo the other."""
    model, other = pair
    with flash.enabled():
        assert calls_of_each(lambda model: model(x), model, other) == [2, 2]
        flash.unpatch_model(model)
        assert calls_of_each(lambda model: model(x), model) == [2]
        flash.patch_model(model)
    assert calls_of_each(lambda model: model(x), model, other) == [2, 0]
    flash.disable()
    assert calls_of_each(lambda model: model(x), model, other) == [2, 0]


def test_at_the_same_time_as_others(pair, x):
    """If two models of one class run in two threads, only the patched model uses flash attention."""
    model, other = pair
    off, begun = other(x), threading.Barrier(2)
    mx.eval(off)

    def run(model):
        begun.wait()
        results = [model(x) for _ in range(20)]
        mx.eval(results)
        return results

    with ThreadPoolExecutor(2) as pool:
        _, results = pool.map(run, [model, other])
    assert flash.status().calls == {"cpu_prefill": 20 * 2}
    assert all(mx.array_equal(one, off) for one in results)


def test_a_layer_that_is_computed_again(pair, x, monkeypatch):
    """To compute gradients, mx.checkpoint runs a layer a second time, after the call of the model has ended."""
    model, other = pair

    def gradient(model):
        layer = type(model.layers[0])
        monkeypatch.setattr(layer, "__call__", layer.__call__)
        grad_checkpoint(model.layers[0])
        return nn.value_and_grad(model, lambda model: model(x).square().mean())(model)[1]

    before = flash.status().calls
    mx.eval(gradient(model))
    assert flash.status().calls == {**before, "cpu_prefill": 4, "cpu_backward": 2}  # each layer runs twice
    mx.eval(gradient(other))
    assert flash.status().calls == {**before, "cpu_prefill": 4, "cpu_backward": 2}


def test_a_model_of_any_package(mlx_own):
    """patch_model() also takes models of other packages, here MLX's nn.TransformerEncoder."""
    model, other, x = nn.TransformerEncoder(1, 16, 2), nn.TransformerEncoder(1, 16, 2), mx.ones((1, 12, 16))
    expected = model(x, None)
    flash.patch_model(model)
    assert mx.allclose(model(x, None), expected, atol=1e-5)
    assert calls_of_each(lambda model: model(x, None), model, other) == [1, 0]
    flash.unpatch_model(model)
    assert mx.fast.scaled_dot_product_attention is mlx_own


def test_nothing_is_left_of_the_last_one(tiny, mlx_own, original):
    """The patch does not keep models alive. When all patched models are gone, status() restores the functions."""
    finders, model, other = list(sys.meta_path), tiny(), tiny()
    flash.patch_model(model)
    flash.patch_model(other)
    assert flash.status().instances == 2
    del model, other
    gc.collect()
    now = flash.status()
    assert (now.instances, now.patched) == (0, ())
    assert mx.fast.scaled_dot_product_attention is mlx_own
    assert qwen2.scaled_dot_product_attention is original
    assert sys.meta_path == finders
    assert type(mx.fast) is type(mx)


@pytest.mark.parametrize("switch", [flash.patch_model, flash.unpatch_model])
@pytest.mark.parametrize("model", ["qwen2", None])
def test_what_cannot_be_patched(switch, model):
    says = rf"\[{switch.__name__}\] model is {model!r}, expected an mlx.nn.Module"
    with pytest.raises(TypeError, match=says):
        switch(model)


class Refuses(nn.Sequential):
    """A class that Python cannot subclass without the argument `key`."""

    def __init_subclass__(cls, *, key):
        pass


def test_a_class_that_cannot_be_derived_from_leaves_the_model_as_it_was(mlx_own):
    model = nn.Sequential(nn.MultiHeadAttention(8, 2), Refuses(nn.Linear(2, 2)))
    classes = types_of(model)
    with pytest.raises(TypeError, match="key"):
        flash.patch_model(model)
    assert types_of(model) == classes
    assert mx.fast.scaled_dot_product_attention is mlx_own
