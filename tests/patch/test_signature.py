"""If mlx-lm's function has another signature than the one tested, enable() and patch_model() refuse and name both."""

import inspect
import re

import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, cache
from mlxlm_flash_patch.registry import SEAM


@pytest.mark.parametrize(
    ("owner", "name", "takes"),
    [
        (base, SEAM, "(queries, keys, values, cache, scale, mask, sinks=None, softcap=None)"),
        (base, SEAM, "(queries, keys, values, cache, scale, mask)"),
        (base, SEAM, "(q, k, v, cache, scale, mask, sinks=None)"),
        (base, SEAM, "(queries, keys, values, cache, scale, mask=None, sinks=None)"),
        (base, SEAM, "(queries, keys, values, cache, scale, mask, *, sinks=None)"),
        (base, "create_causal_mask", "(N, offset=0, extra=0)"),
        (cache.RotatingKVCache, "make_mask", "(self, N, window_size=None, extra=0)"),
        (cache.BatchRotatingKVCache, "make_mask", "(self, N, window_size=None, extra=0)"),
    ],
)
def test_refused(owner, name, takes, monkeypatch, tiny):
    held, model, space = vars(owner)[name], tiny(), {}
    exec(f"def another{takes}: ...", space)
    monkeypatch.setattr(held, "__signature__", inspect.signature(space["another"]), raising=False)
    types = [type(m) for m in model.modules()]
    says = re.escape(f"{name} takes {takes}; this mlxlm-flash-patch was tested with (")
    users = [flash.enable, lambda: flash.enable("qwen2")]
    if name == SEAM:  # patch_model() does without descriptions of masks
        users.append(lambda: flash.patch_model(model))
    for refused in users:
        with pytest.raises(RuntimeError, match=says):
            refused()
        assert vars(owner)[name] is held
        assert not flash.status().enabled
        assert not flash.status().patched
    assert [type(m) for m in model.modules()] == types


def test_annotations_do_not_matter(monkeypatch):
    monkeypatch.setattr(base.scaled_dot_product_attention, "__annotations__", {"queries": int})
    with flash.enabled():
        assert flash.status().patched


def test_what_is_put_in_place_has_that_signature(original):
    def bare(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    with flash.enabled():
        assert bare(base.scaled_dot_product_attention) == bare(original)
