"""patch_model(): one instance, through its classes; every other model in the process runs as before."""

import copy
import gc
import pickle
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
import pytest
from arms import calls_of, close
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from mlxlm_flash_patch.places import places
from mlxlm_flash_patch.registry import SEAM
from model_configs import ARCHITECTURES, config, random_model

COPIES = pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)


def arrays(model):
    return {name: array.tolist() for name, array in tree_flatten(model.parameters())}


def types_of(model):
    return [type(module) for module in model.modules()]


def calls_of_each(x, *models):
    return [calls_of(lambda model=model: model(x)) for model in models]


@pytest.fixture
def pair(tiny):
    """A model that is patched, and another of the same class."""
    model = tiny()
    flash.patch_model(model)
    return model, tiny(seed=1)


@pytest.fixture
def x(tokens):
    x = tokens()
    mx.eval(x)  # in this thread, whose stream it is
    return x


@pytest.mark.parametrize("model_type", [*ARCHITECTURES, "gemma2", "gear", "phi3small", "plamo2", "deepseek_v41"])
def test_this_model_and_no_other(model_type, x):
    """By each way to the kernels: deepseek_v41 calls attention from a function of its module, not from a class."""

    def make(seed=0):
        return random_model(model_type, config(model_type), seed=seed)

    def run(model):
        return model(x, cache=make_prompt_cache(model))

    def calls_in(*models):
        return [calls_of(lambda model=model: run(model)) for model in models]

    model, other = make(), make(seed=1)
    off, of_other, types = run(model), run(other), types_of(model)
    flash.patch_model(model)
    assert close(run(model), off)
    on = 1 if model_type == "plamo2" else 2  # every second layer of it is no attention
    assert calls_in(model, copy.deepcopy(model), other, make()) == [on, on, 0, 0]
    assert mx.array_equal(run(other), of_other)
    with flash.enabled():
        assert calls_in(model, other) == [on, on]

    flash.unpatch_model(model)
    assert types_of(model) == types
    assert all(place.is_original(place.held) for place in places() if place.module.startswith("mlx_lm.models."))
    assert calls_in(model) == [0]
    assert mx.array_equal(run(model), off)
    assert flash.status().fallbacks == {}


def test_it_is_the_same_model(tiny):
    """Parameters, children, names, text, and types as isinstance sees them. Attention alone has another class."""
    model = tiny()
    before = arrays(model), repr(model), [name for name, _ in model.named_modules()]
    types = types_of(model)
    flash.patch_model(model)
    assert (arrays(model), repr(model), [name for name, _ in model.named_modules()]) == before
    assert all(isinstance(m, t) for m, t in zip(model.modules(), types, strict=True))
    assert [(t.__module__, t.__qualname__) for t in types_of(model)] == [(t.__module__, t.__qualname__) for t in types]
    others = {name for name, m in model.named_modules() if type(m) not in types}
    assert others == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    flash.unpatch_model(model)
    assert types_of(model) == types
    assert arrays(model) == before[0]


@COPIES
@pytest.mark.parametrize("unpatched", [0, 1], ids=["the model", "the copy"])
def test_copies_are_patched_too(pair, x, again, unpatched):
    both = pair[0], again(pair[0])
    assert arrays(both[0]) == arrays(both[1])
    assert mx.array_equal(both[0](x), both[1](x))
    assert calls_of_each(x, *both) == [2, 2]
    flash.unpatch_model(both[unpatched])
    assert calls_of_each(x, both[unpatched], both[1 - unpatched]) == [0, 2]


class Derived:
    """Filled with a class that was derived from a patched model's: pickle finds it here."""


@COPIES
def test_a_class_that_was_derived_from_a_patched_one(pair, x, again, monkeypatch):
    model, _ = pair
    derived = type("Derived", (type(model.layers[0].self_attn),), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Derived", derived)
    for layer in model.layers:
        object.__setattr__(layer.self_attn, "__class__", derived)
    assert calls_of_each(x, model, again(model)) == [2, 2]
    with pytest.raises(TypeError, match=r"\[unpatch_model\] model has a .*Derived, a class that was derived from"):
        flash.unpatch_model(model)
    assert calls_of_each(x, model) == [2]


def test_a_module_made_of_a_patched_one_s_class(pair):
    """It is patched as long as it lives, whatever becomes of the first."""
    model, _ = pair
    attention = type(model.layers[0].self_attn)(model.args)
    flash.unpatch_model(model)
    assert calls_of_each(mx.ones((1, 12, 128)), attention) == [1]


def test_twice_is_once(tiny, x):
    model = tiny()
    types = types_of(model)
    flash.unpatch_model(model)  # nothing to do
    assert types_of(model) == types
    flash.patch_model(model)
    flash.patch_model(model)
    assert calls_of_each(x, model) == [2]
    assert flash.status().instances == 1
    flash.unpatch_model(model)
    assert types_of(model) == types


def test_with_enable(pair, x):
    """Either way in is enough, and leaving one does not leave the other."""
    model, other = pair
    with flash.enabled():
        assert calls_of_each(x, model, other) == [2, 2]
        flash.unpatch_model(model)
        assert calls_of_each(x, model) == [2]
        flash.patch_model(model)
    assert calls_of_each(x, model, other) == [2, 0]
    flash.disable()
    assert calls_of_each(x, model, other) == [2, 0]


def test_at_the_same_time_as_others(pair, x):
    """Of two models of a class that run in two threads, the patched one's attention is flash attention."""
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


def test_compiled(pair, x):
    model, other = (mx.compile(lambda x, model=model: model(x)) for model in pair)
    assert calls_of_each(x, model, other, model, other) == [2, 0, 2, 0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception(pair, x, error, monkeypatch):
    """Nothing remembers the call that did not end."""

    def fails(x):
        raise error

    with monkeypatch.context() as broken:
        broken.setitem(pair[0].layers[1].self_attn, "o_proj", fails)
        with pytest.raises(error):
            pair[0](x)
    assert calls_of_each(x, *pair) == [2, 0]


THEIRS = """
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

class Parent(nn.Module):
    def attend(self, x):
        return [scaled_dot_product_attention(q, q, q, None, 1.0, None) for q in (x,)][0]

class Child(Parent):
    def __call__(self, x, scale=2.0, *, shift: float = 1.0):
        inner = lambda q: scaled_dot_product_attention(q, q, q, None, 1.0, None)
        return inner(x) * scale + super().attend(x) * 0 + self.attend(x) * 0 + shift
"""


def test_a_module_of_another_package(monkeypatch, original):
    """Code of every shape: defaults, super(), inner functions, inherited and other methods.

    The module's global is exchanged, too, as long as a model of it is patched; enable() leaves it alone.
    """
    theirs = types.ModuleType("their_model")
    monkeypatch.setitem(sys.modules, "their_model", theirs)
    exec(THEIRS, vars(theirs))
    model, other, x = theirs.Child(), theirs.Child(), mx.ones((1, 2, 12, 8))
    flash.patch_model(model)
    assert mx.allclose(model(x), x * 3)
    assert mx.allclose(model(x, 3.0, shift=0.0), x * 3)
    assert calls_of(lambda: model.attend(x)) == 1  # as iquestloopcoder has it called
    assert type(model).__call__.__annotations__ == {"shift": float}
    with flash.enabled():
        assert calls_of_each(x, model, other) == [3, 0]
    assert calls_of_each(x, model, other) == [3, 0]
    flash.unpatch_model(model)
    assert vars(theirs)[SEAM] is original


def test_a_class_that_is_changed_afterwards(pair, monkeypatch):
    """Code is looked up when it runs."""
    changed = {}
    exec(f"def __call__(self, x, *_): return 0 * {SEAM}(x, x, x, None, 1.0, None)", vars(qwen2), changed)
    monkeypatch.setattr(qwen2.Attention, "__call__", changed["__call__"])
    flash.patch_model(pair[1])
    x = mx.ones((1, 1, 12, 128))
    for model in pair:
        assert calls_of(lambda model=model: model.layers[0].self_attn(x)) == 1
        assert mx.array_equal(model.layers[0].self_attn(x), 0 * x)


def test_nothing_is_left_of_the_last_one(tiny, original):
    """Instances are counted weakly. Without unpatch_model() all is as it was after the next change of any kind."""
    finders, model, other = list(sys.meta_path), tiny(), tiny()
    flash.patch_model(model)
    flash.patch_model(other)
    assert flash.status().instances == 2
    del model, other
    gc.collect()
    assert flash.status().instances == 0
    flash.disable()
    assert qwen2.scaled_dot_product_attention is original
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        (nn.Linear(2, 2), ValueError, r"\[patch_model\] model is a .*Linear, no module of which has mlx-lm's own"),
        ("qwen2", TypeError, r"\[patch_model\] model is 'qwen2', expected an mlx.nn.Module"),
        (None, TypeError, "model is None"),
    ],
    ids=["nothing to patch", "a name", "None"],
)
def test_what_cannot_be_patched(model, error, says):
    with pytest.raises(error, match=says):
        flash.patch_model(model)
    if error is TypeError:
        with pytest.raises(TypeError, match=says.replace("patch_model", "unpatch_model")):
            flash.unpatch_model(model)


def test_another_library_s_function_is_left_alone(tiny, monkeypatch):
    monkeypatch.setattr(qwen2, SEAM, lambda *a, **k: None)
    with pytest.raises(ValueError, match="own attention"):
        flash.patch_model(tiny())
