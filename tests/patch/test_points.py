"""The patch replaces the functions in POINTS, and no others, and restores them.

A function of mlx-lm is replaced only if its source text is known. For one function, only the signature is compared.
"""

import importlib
import importlib.util
import linecache
import pkgutil

import mlx.core as mx
import mlx_lm.models
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, gemma2
from mlxlm_flash_patch import patch_points
from mlxlm_flash_patch.patch_points import POINTS

from tests.core.programs import python
from tests.patch.arms import calls_of
from tests.patch.model_configs import config, random_model
from tests.promises import promise


@promise("the patch changes nothing but the names of the functions that it replaces, and disable() restores these")
def test_nothing_else_changes():
    """In mlx-lm's modules and classes, the patch rebinds only the names of functions that it replaces."""
    names = {f"mlx_lm.models.{info.name}" for info in pkgutil.iter_modules(mlx_lm.models.__path__)}
    names.remove("mlx_lm.models.olmo")  # its import ends the process if a package that it needs is missing
    modules = [(name, importlib.import_module(name)) for name in sorted(names)]
    originals = {id(point.current) for point in POINTS}

    def contents():
        owners = [("mlx.core.fast", mx.fast), *modules]
        owners += [(f"{at}.{c.__qualname__}", c) for at, m in owners for c in vars(m).values() if isinstance(c, type)]
        return {f"{at}.{name}": id(value) for at, owner in owners for name, value in vars(owner).items()}

    before = contents()
    with flash.enabled():
        changed = {name for name, value in contents().items() if before[name] != value}
        assert set(flash.status().patched) == {point.name for point in POINTS}
        assert not originals & {id(point.current) for point in POINTS}
    assert {before[name] for name in changed} <= originals
    assert contents() == before


@pytest.fixture
def reads(monkeypatch):
    """reads(function, (old, new)): replaces `old` in the source that Python finds. With None, hides the source."""

    def instead(function, text):
        file = function.__code__.co_filename
        lines = linecache.getlines(file)
        original = "".join(lines)
        monkeypatch.setattr(linecache, "checkcache", lambda *_: None)
        monkeypatch.setattr(patch_points, "fingerprint", patch_points.fingerprint.__wrapped__)  # without its cache
        changed = original.replace(*text) if text else ""
        assert changed != original
        monkeypatch.setitem(linecache.cache, file, (1, None, changed.splitlines(keepends=True), file))

    return instead


@promise("an unknown function of mlx-lm is not replaced, with one warning")
def test_an_edited_gemma2_is_left_alone(reads, tokens):
    """The patch does not replace an edited function, and warns in one line. It still patches other models."""
    own = gemma2.Attention.__call__
    reads(own, ("queries = queries * self.scale", "queries = queries * self.scale * 1"))
    with pytest.warns(flash.FlashFallbackWarning) as warned:
        flash.enable()
    [line] = [str(each.message) for each in warned]
    assert line == (
        "mlx_lm.models.gemma2.Attention.__call__ was not replaced: its source is not that of a tested release. "
        "It still runs unpatched; all other functions are replaced."
    )
    assert gemma2.Attention.__call__ is own
    assert set(flash.status().patched) == {point.name for point in POINTS} - {"mlx_lm.models.gemma2.Attention.__call__"}
    x = tokens()
    model, llama = (random_model(name, config(name)) for name in ("gemma2", "llama"))
    assert [calls_of(lambda model=model: model(x)) for model in (model, llama)] == [0, 2]
    with flash.enabled():  # does not warn again
        pass


def test_another_signature(monkeypatch):
    """The source of mlx-lm's attention over quantised caches differs between releases, so the signature is compared."""
    name = "quantized_scaled_dot_product_attention"
    monkeypatch.setattr(base, name, base.quantized_scaled_dot_product_attention)
    exec(f"def {name}(q, k, v): ...", vars(base))
    other = vars(base)[name]
    with pytest.warns(flash.FlashFallbackWarning, match=f"{name} was not replaced: its signature"):
        flash.enable()
    assert vars(base)[name] is other


def test_without_sources(reads):
    """Without mlx-lm's source, the patch still replaces the function that it recognises by its signature."""
    own = base.create_causal_mask
    reads(own, None)
    with pytest.warns(flash.FlashFallbackWarning, match="not replaced: its source is not available"):
        flash.enable()
    assert base.create_causal_mask is own
    assert "mlx_lm.models.base.quantized_scaled_dot_product_attention" in flash.status().patched


WITHOUT_MLX_LM = """
import sys
import mlx.core as mx, mlx.nn as nn, mlxlm_flash_patch as flash
sys.modules["mlx_lm"] = None
with flash.enabled(strict=True):
    layer, x = nn.MultiHeadAttention(32, 4), mx.ones((1, 20, 32))
    mx.eval(layer(x, x, x))
    print(flash.status().calls, flash.status().patched)
"""


@promise("without mlx-lm the patch serves the calls it can")
def test_without_mlx_lm():
    ran = "{'cpu_prefill': 1} ('mx.fast.scaled_dot_product_attention',)\n"
    assert python(WITHOUT_MLX_LM).stdout == ran
