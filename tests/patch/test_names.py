"""While the patch is on, every name of an attention function in any module leads to flash attention."""

import importlib
import importlib.util
import json
import sys
import types

import mlx.core as mx
import mlx.nn
import mlx.utils
import mlx_lm.models
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, cache, gemma2, llama, qwen2
from mlx_lm.utils import load_model
from mlxlm_flash_patch import patch_points

from tests.core.programs import python
from tests.patch.arms import calls, calls_of, close
from tests.patch.model_configs import config, random_model
from tests.promises import promise

Q = mx.ones((1, 2, 12, 8))
IMPORTS = {
    "from mlx.core.fast import scaled_dot_product_attention": (
        lambda m: m.scaled_dot_product_attention(Q, Q, Q, scale=1)
    ),
    "from mlx.core.fast import scaled_dot_product_attention as sdpa": lambda m: m.sdpa(Q, Q, Q, scale=1),
    "import mlx.core as mx; attend = mx.fast.scaled_dot_product_attention": lambda m: m.attend(Q, Q, Q, scale=1),
    "from mlx.core import fast": lambda m: m.fast.scaled_dot_product_attention(Q, Q, Q, scale=1),
    "from mlx_lm.models.base import scaled_dot_product_attention": (
        lambda m: m.scaled_dot_product_attention(Q, Q, Q, None, 1, None)
    ),
    "from mlx_lm.models.base import scaled_dot_product_attention as sdpa": lambda m: m.sdpa(Q, Q, Q, None, 1, None),
}


@pytest.fixture
def module(monkeypatch):
    """module(text): a module of another package, with this source."""

    def make(text):
        made = types.ModuleType("their_model")
        monkeypatch.setitem(sys.modules, "their_model", made)
        exec(text, vars(made))
        return made

    return make


@promise("every module's name for the function is flash attention only while the patch is on")
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("text", IMPORTS)
def test_a_name_of_another_package(module, text, before):
    """After the patch is off, the module's name refers to the same object as if the patch had never been on."""
    expected = dict(vars(module(text)))
    made = module(text)
    if not before:
        sys.modules.pop("their_model")
    with flash.enabled(strict=True):
        if not before:
            made = module(text)
        assert calls_of(lambda: IMPORTS[text](made)) == 1
    assert calls_of(lambda: IMPORTS[text](made)) == 0
    names = vars(made).keys() - {"__builtins__"}
    assert all(vars(made)[name] is expected[name] for name in names)


BLOCKS = """
import sys, types
import mlx.core as mx, mlxlm_flash_patch as flash
from mlx_lm.models import llama
from mlxlm_flash_patch import patch_points

theirs, held = types.ModuleType("theirs"), []
sys.modules["theirs"] = theirs
searches, search = [], patch_points._search_modules
patch_points._search_modules = lambda pairs: (searches.append(pairs), search(pairs))

def ours():
    values = [*vars(theirs).values(), llama.scaled_dot_product_attention, mx.fast.scaled_dot_product_attention]
    return {patch_points.is_ours(value) for value in values if callable(value)}

def check(expected, during=lambda: None):
    searches.clear()
    with flash.enabled():
        assert ours() == {True}
        during()
    assert ours() == {False}
    assert bool(searches) == expected, (bool(searches), held, vars(theirs))

check(True)
check(False)
theirs.name = llama.scaled_dot_product_attention
check(True)
check(False)
theirs.name, theirs.other = None, theirs.name  # as many references as before
check(True)
check(False)
check(True, lambda: setattr(theirs, "bound_meanwhile", mx.fast.scaled_dot_product_attention))
check(False)
check(True, lambda: held.append(mx.fast.scaled_dot_product_attention))
check(True, lambda: setattr(theirs, "put_back", held.pop()))  # as many references as before
check(False)
held.append(mx.fast.scaled_dot_product_attention)
check(True)
check(True)  # modules are searched as long as something unknown refers to a function
theirs.another = held.pop()
check(True)
check(False)
print("fine")
"""


def test_a_block_searches_modules_only_if_there_may_be_new_names(light):
    """The first block searches all modules. A later one does so only if something new refers to a function.

    A search takes milliseconds. Names that a module got between the blocks or meanwhile are exchanged and restored.
    """
    assert python(BLOCKS, **light).stdout == "fine\n"


@promise("modules that are imported later are patched, and given back")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gear", "phi3small", "gemma3_text"])
def test_a_model_that_is_imported_while_the_patch_is_on(late, tokens, name):
    with flash.enabled(strict=True):
        module = late(name)
        model = random_model(name, config(name))
        assert calls_of(lambda: model(tokens())) == 2
    assert not any("mlxlm_flash_patch" in str(getattr(held, "__module__", "")) for held in vars(module).values())
    assert calls_of(lambda: model(tokens())) == 0


@pytest.mark.parametrize("module", [base, cache, gemma2, llama, qwen2], ids=lambda module: module.__name__)
def test_a_module_that_is_loaded_anew(module, monkeypatch):
    """A reload leaves the patch on. Switching the patch off restores the module and its old and new classes."""
    for name, held in vars(module).items():
        monkeypatch.setitem(vars(module), name, held)  # restored after the test
    classes = {held: vars(held).copy() for held in vars(module).values() if isinstance(held, type)}
    with flash.enabled():
        before = set(flash.status().patched)
        importlib.reload(module)
        assert set(flash.status().patched) == before
    with flash.enabled():  # also what other modules hold from before the reload
        assert patch_points.is_ours(qwen2.scaled_dot_product_attention)
    assert flash.status().patched == ()
    for name in ("__call__", "make_mask"):
        assert all(vars(cls).get(name) is before.get(name) for cls, before in classes.items())


@pytest.mark.parametrize("before", [True, False], ids=["loaded before", "loaded after"])
def test_a_model_that_brings_its_own_file(tmp_path, tokens, before):
    """mlx-lm loads the file that config.json names as `model_file`. It does not put the module into sys.modules."""
    with open(llama.__file__) as source:
        (tmp_path / "own.py").write_text(source.read().replace("from .", "from mlx_lm.models."))
    settings = {**config("llama"), "model_file": "own.py"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    weights = dict(mlx.utils.tree_flatten(random_model("llama", config("llama")).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)

    def load():
        return load_model(tmp_path, trust_remote_code=True)[0]

    model = load() if before else None
    off = load()(tokens())
    with flash.enabled(strict=True):
        model = model or load()
        on = model(tokens())
        mx.eval(on)
        assert calls() == 2
    assert type(model).__module__ == "custom_model"
    assert close(on, off)


def test_a_lazy_module_is_not_loaded(tmp_path, monkeypatch):
    """LazyLoader loads a module when one of its attributes is first read. So the patch must not read its attributes."""
    (tmp_path / "a_lazy_module.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("a_lazy_module")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "a_lazy_module", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "an_odd_one", type("Odd", (), {"__dict__": property(lambda self: 1 / 0)})())
    flash.enable()
    flash.disable()
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        module.anything  # noqa: B018


def test_a_finder_without_find_spec(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    assert patch_points._finder.find_spec(gemma2.__name__, mlx_lm.models.__path__).origin == gemma2.__file__


IMPORTING = """
import importlib, sys, threading
from importlib.machinery import PathFinder
import mlx_lm.models, mlxlm_flash_patch as flash

begun, go_on = threading.Event(), threading.Event()

class Slow(PathFinder):
    @classmethod
    def find_spec(cls, name, *where):
        spec = super().find_spec(name, *where)
        if name == "mlx_lm.models.gemma2":
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: [begun.set(), go_on.wait(), execute(module)]
        return spec

sys.meta_path.insert(0, Slow)
threading.Thread(target=importlib.import_module, args=["mlx_lm.models.gemma2"]).start()
begun.wait()
threading.Timer(0.3, go_on.set).start()
flash.enable()
assert "mlx_lm.models.gemma2.Attention.__call__" in flash.status().patched
"""


def test_a_module_that_another_thread_is_importing():
    """enable() waits for the import, whose beginning it has missed, and then replaces the module's functions."""
    python(IMPORTING)
