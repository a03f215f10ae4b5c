"""patch_model(): one instance, through its classes; everything else in the process stays as it is."""

import copy
import gc
import pickle
import sys
import threading
import types

import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import base, qwen2

SEAM = "scaled_dot_product_attention"


def arrays(model):
    return {name: array.tolist() for name, array in tree_flatten(model.parameters())}


def calls_of(model, x):
    """Flash attention calls of one prefill."""
    before = flash.status().calls.get("cpu_prefill", 0)
    mx.eval(model(x))
    return flash.status().calls.get("cpu_prefill", 0) - before


def test_this_model_and_no_other(tiny, tokens, architecture, original):
    model, other, x = tiny(architecture), tiny(architecture, seed=1), tokens()
    module = sys.modules[type(model).__module__]
    off = model(x)
    flash.patch_model(model)
    on = model(x)
    assert mx.allclose(on, off, rtol=1e-4, atol=1e-4)
    assert calls_of(model, x) == 2
    assert calls_of(other, x) == 0
    assert calls_of(tiny(architecture), x) == 0  # nor one made later
    assert base.scaled_dot_product_attention is original

    flash.unpatch_model(model)
    assert module.scaled_dot_product_attention is original
    assert calls_of(model, x) == 0
    assert mx.array_equal(model(x), off)
    assert flash.status().fallbacks == {}


def test_generation(tiny, tokens):
    model, prompt = tiny(), tokens()[0]

    def greedy():
        return [token for token, _ in generate_step(prompt, model, max_tokens=16)]

    off = greedy()
    flash.patch_model(model)
    assert greedy() == off
    assert flash.status().calls["cpu_decode"] >= 2 * 16


def test_it_is_the_same_model(tiny):
    """Parameters, state, children, names, types as isinstance sees them, and text."""
    model = tiny()
    before = arrays(model), repr(model), [name for name, _ in model.named_modules()]
    types = [type(m) for m in model.modules()]
    flash.patch_model(model)
    assert (arrays(model), repr(model), [name for name, _ in model.named_modules()]) == before
    assert all(isinstance(m, t) for m, t in zip(model.modules(), types, strict=True))
    assert [type(m).__qualname__ for m in model.modules()] == [t.__qualname__ for t in types]
    assert [type(m).__module__ for m in model.modules()] == [t.__module__ for t in types]
    flash.unpatch_model(model)
    assert [type(m) for m in model.modules()] == types
    assert arrays(model) == before[0]


def test_only_modules_with_the_seam_change(tiny):
    model = tiny()
    types = {name: type(m) for name, m in model.named_modules()}
    flash.patch_model(model)
    changed = {name.rpartition(".")[2] for name, m in model.named_modules() if type(m) is not types[name]}
    assert changed == {"self_attn"}


def test_saving_and_loading(tiny, tmp_path):
    model, other = tiny(), tiny(seed=1)
    flash.patch_model(model)
    model.save_weights(str(tmp_path / "model.safetensors"))
    other.load_weights(str(tmp_path / "model.safetensors"))
    assert arrays(other) == arrays(model)


COPIES = pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)


@COPIES
def test_copies_are_patched_too(tiny, tokens, again):
    model, x = tiny(), tokens()
    flash.patch_model(model)
    twin = again(model)
    assert arrays(twin) == arrays(model)
    assert mx.array_equal(twin(x), model(x))
    assert calls_of(twin, x) == 2
    flash.unpatch_model(model)
    assert calls_of(twin, x) == 2
    assert calls_of(model, x) == 0


class Derived:
    """Filled with a class that was derived from a patched model's: pickle finds it here."""


@COPIES
def test_a_class_that_was_derived_from_a_patched_one(tiny, tokens, again, monkeypatch):
    model, x = tiny(), tokens()
    flash.patch_model(model)
    derived = type("Derived", (type(model.layers[0].self_attn),), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Derived", derived)
    for layer in model.layers:
        object.__setattr__(layer.self_attn, "__class__", derived)
    assert calls_of(model, x) == calls_of(again(model), x) == 2
    with pytest.raises(TypeError, match=r"\[unpatch_model\] model has a .*Derived, a class that was derived from"):
        flash.unpatch_model(model)
    assert calls_of(model, x) == 2


def test_a_module_made_of_a_patched_one_s_class(tiny):
    """It is patched as long as it lives, whatever becomes of the first."""
    model, x = tiny(), mx.ones((1, 12, 128))
    flash.patch_model(model)
    attention = type(model.layers[0].self_attn)(model.args)
    flash.unpatch_model(model)
    assert calls_of(attention, x) == 1


def test_nothing_is_left_of_the_last_one(tiny, tokens, original):
    """Without unpatch_model(): with the next change of any kind."""
    finders = list(sys.meta_path)
    model = tiny()
    flash.patch_model(model)
    del model
    gc.collect()
    flash.disable()
    assert qwen2.scaled_dot_product_attention is original
    assert sys.meta_path == finders


def test_at_the_same_time_as_others(tiny, tokens):
    """Of two models of a class that run in two threads, the patched one's attention is flash attention."""
    model, other, x = tiny(), tiny(seed=1), tokens()
    off, begun, results = other(x), threading.Barrier(2), {}
    mx.eval(x, off)  # in this thread, whose stream it is
    flash.patch_model(model)
    before = flash.status().calls.get("cpu_prefill", 0)

    def run(name, model):
        begun.wait()
        results[name] = [model(x) for _ in range(20)]
        mx.eval(results[name])

    threads = [threading.Thread(target=run, args=pair) for pair in [("patched", model), ("other", other)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert flash.status().calls["cpu_prefill"] - before == 20 * 2
    assert all(mx.array_equal(one, off) for one in results["other"])


def test_compiled(tiny, tokens):
    model, other, x = tiny(), tiny(seed=1), tokens()
    off = other(x)
    flash.patch_model(model)
    assert calls_of(mx.compile(lambda x: model(x)), x) == 2
    compiled = mx.compile(lambda x: other(x))
    assert calls_of(compiled, x) == 0
    assert mx.allclose(compiled(x), off, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception(tiny, tokens, error, monkeypatch):
    """Nothing remembers the call that did not end."""
    model, other, x = tiny(), tiny(seed=1), tokens()
    flash.patch_model(model)

    def fails(x):
        raise error

    with monkeypatch.context() as broken:
        broken.setitem(model.layers[1].self_attn, "o_proj", fails)
        with pytest.raises(error):
            model(x)
    assert calls_of(other, x) == 0
    assert calls_of(model, x) == 2


def test_a_module_of_another_package(monkeypatch, original):
    """Its global is exchanged, too, as long as a model of it is patched; enable() leaves it alone."""
    theirs = types.ModuleType("their_model")
    monkeypatch.setitem(sys.modules, "their_model", theirs)
    exec(
        f"import mlx.nn as nn\nfrom mlx_lm.models.base import {SEAM}\nclass Attention(nn.Module):\n"
        f"    def __call__(self, x): return {SEAM}(x, x, x, None, 1.0, None)",
        vars(theirs),
    )
    model, other, x = theirs.Attention(), theirs.Attention(), mx.ones((1, 2, 12, 8))
    flash.patch_model(model)
    with flash.enabled():
        assert [calls_of(model, x), calls_of(other, x)] == [1, 0]
    assert [calls_of(model, x), calls_of(other, x)] == [1, 0]
    flash.unpatch_model(model)
    assert vars(theirs)[SEAM] is original


def test_twice_is_once(tiny, tokens):
    model = tiny()
    types = [type(m) for m in model.modules()]
    flash.patch_model(model)
    flash.patch_model(model)
    assert calls_of(model, tokens()) == 2
    assert flash.status().instances == 1
    flash.unpatch_model(model)
    assert [type(m) for m in model.modules()] == types


def test_unpatching_what_is_not_patched(tiny):
    model = tiny()
    types = [type(m) for m in model.modules()]
    flash.unpatch_model(model)
    assert [type(m) for m in model.modules()] == types


def test_with_enable(tiny, tokens):
    """Either way in is enough, and leaving one does not leave the other."""
    model, other, x = tiny(), tiny(seed=1), tokens()
    with flash.enabled():
        flash.patch_model(model)
        assert calls_of(model, x) == calls_of(other, x) == 2
        flash.unpatch_model(model)
        assert calls_of(model, x) == 2
        flash.patch_model(model)
    assert calls_of(model, x) == 2
    assert calls_of(other, x) == 0


def test_fallbacks_are_counted_and_warned_about(tiny, too_wide):
    model = tiny()
    flash.patch_model(model)
    with pytest.warns(flash.FlashFallbackWarning, match=too_wide) as warned:
        model.layers[0].self_attn(mx.zeros((1, 12, 128)))
    assert flash.status().fallbacks == {too_wide: 1}
    assert warned[0].filename == qwen2.__file__


def test_the_module_s_other_globals_are_looked_up_when_used(tiny, tokens, monkeypatch):
    """The patched code sees later changes of its module, as the original does."""
    monkeypatch.setattr(qwen2, "helper", lambda x: x, raising=False)
    source = (
        "def __call__(self, x):\n    y = helper(scaled_dot_product_attention(x, x, x, None, 1.0, None))\n    return y"
    )

    class Attention(nn.Module):
        exec(source, vars(qwen2), locals())

    model, x = Attention(), mx.ones((1, 2, 12, 8))
    flash.patch_model(model)
    assert type(model) is not Attention
    assert type(model).__qualname__ == Attention.__qualname__
    assert mx.allclose(model(x), x)
    monkeypatch.setattr(qwen2, "helper", lambda x: x * 0)
    assert mx.array_equal(model(x), x * 0)
    monkeypatch.delattr(qwen2, "helper")
    with pytest.raises(NameError, match="helper"):
        model(x)


def test_code_of_every_shape(tokens, monkeypatch):
    """Defaults, keyword defaults, super(), inner functions, inherited methods, imports inside a function."""
    source = """
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = []

    def attend(self, x):
        return [scaled_dot_product_attention(q, q, q, None, 1.0, None) for q in (x,)][0]

class Child(Parent):
    def __call__(self, x, scale=2.0, *, shift: float = 1.0):
        from . import base
        inner = lambda q: scaled_dot_product_attention(q, q, q, None, 1.0, None)
        return inner(x) * scale + super().attend(x) * 0 + self.attend(x) * 0 + shift
"""
    module = type(sys)("mlx_lm.models.custom")
    module.__package__ = "mlx_lm.models"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, vars(module))
    model, x = module.Child(), mx.ones((1, 2, 12, 8))
    flash.patch_model(model)
    assert mx.allclose(model(x), x * 3)
    assert mx.allclose(model(x, 3.0, shift=0.0), x * 3)
    assert type(model).__call__.__annotations__ == {"shift": float}
    assert flash.status().calls["cpu_prefill"] > 0


def test_a_class_that_was_changed_after_the_first_use(tiny, tokens, monkeypatch):
    """Generated classes are kept, but not beyond the code they were made of."""
    first, second, x = tiny(), tiny(seed=1), mx.ones((1, 12, 128))
    flash.patch_model(first)
    changed = {}
    exec(
        "def __call__(self, x, *_): return 0 * scaled_dot_product_attention(x, x, x, None, 1.0, None)",
        vars(qwen2),
        changed,
    )
    monkeypatch.setattr(qwen2.Attention, "__call__", changed["__call__"])
    flash.patch_model(second)
    assert mx.array_equal(second.layers[0].self_attn(x[None]), 0 * x[None])


def test_instances_are_counted_weakly(tiny):
    before = flash.status().instances
    model, other = tiny(), tiny()
    flash.patch_model(model)
    flash.patch_model(other)
    assert flash.status().instances == before + 2
    del model
    gc.collect()
    assert flash.status().instances == before + 1
    flash.unpatch_model(other)
    assert flash.status().instances == before


def test_disable_leaves_instances(tiny, tokens):
    model = tiny()
    flash.patch_model(model)
    flash.disable()
    assert calls_of(model, tokens()) == 2


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        (
            nn.Linear(2, 2),
            ValueError,
            r"\[patch_model\] model is a .*Linear, no module of which has mlx-lm's own",
        ),
        ("qwen2", TypeError, r"\[patch_model\] model is a str, expected an mlx.nn.Module"),
        (None, TypeError, "NoneType"),
    ],
    ids=["nothing to patch", "a name", "None"],
)
def test_what_cannot_be_patched(model, error, says):
    with pytest.raises(error, match=says):
        flash.patch_model(model)


def test_unpatching_what_is_no_model():
    with pytest.raises(TypeError, match=r"\[unpatch_model\] model is a str"):
        flash.unpatch_model("qwen2")


def test_another_library_s_function_is_left_alone(tiny, monkeypatch):
    monkeypatch.setattr(qwen2, "scaled_dot_product_attention", lambda *a, **k: None)
    with pytest.raises(ValueError, match="own attention"):
        flash.patch_model(tiny())
