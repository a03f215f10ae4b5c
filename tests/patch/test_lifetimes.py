"""A call is flash attention if the patch is on when the program makes it, also with older models and in children."""

import gc
import importlib
import os
import warnings
import weakref

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base

from tests.patch.arms import calls


@pytest.mark.slow("4 seconds")
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "cache"])
def test_modules_that_were_imported_anew_do_not_pile_up(name, monkeypatch, late):
    """Python frees modules that were imported several times while the patch was on."""
    importlib.import_module(f"mlx_lm.models.{name}")
    with flash.enabled():
        specs = [weakref.ref(late(name).__spec__) for _ in range(20)]
    monkeypatch.undo()
    gc.collect()
    assert sum(spec() is not None for spec in specs) <= 8


@pytest.mark.parametrize("change", [flash.disable, flash.enable])
def test_a_change_inside_a_generation(change, tiny, tokens):
    """The tokens stay the same, and only calls while the patch is on are flash attention."""
    model, prompt = tiny(), tokens()[0]
    expected = [token for token, _ in generate_step(prompt, model, max_tokens=20)]
    if change is flash.disable:
        flash.enable()
    seen, at_change = [], None
    for i, (token, _) in enumerate(generate_step(prompt, model, max_tokens=20)):
        seen.append(token)
        if i == 10:
            change()
            at_change = calls()
    mx.synchronize()
    assert seen == expected
    # generate_step() has built the graph of the next token before the change.
    after = calls() - at_change
    assert after <= 2 * 2 if change is flash.disable else after >= 2 * 8


def test_a_forked_child(original):
    """A forked child starts with its parent's patch; its disable() does not affect the parent."""
    flash.enable()
    with warnings.catch_warnings():  # Python 3.12 warns of a fork while threads run, as MLX's do
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        patched = flash.status().enabled and base.scaled_dot_product_attention is not original
        flash.disable()
        os._exit(0 if patched and base.scaled_dot_product_attention is original else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert base.scaled_dot_product_attention is not original
    assert flash.status().enabled
