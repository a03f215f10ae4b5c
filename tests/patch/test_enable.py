"""enable() and disable() replace functions, and put the originals back."""

import gc
import sys
import warnings

import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, qwen2

from tests.memory import held
from tests.patch.arms import is_in
from tests.promises import promise


@pytest.mark.parametrize("strict", [True, False])
def test_the_second_decides(strict):
    flash.enable(strict=not strict)
    flash.enable(strict=strict)
    assert is_in()
    assert flash.status().strict is strict
    flash.enable(strict=False)  # so that disable() in the fixture unpatched() does not raise


@pytest.mark.parametrize("arguments", [("qwen2",), (True,)])
def test_what_is_asked_for_has_a_name(arguments):
    """Options are keyword-only, so that a positional argument, such as a model type, cannot set `strict`."""
    for switch in (flash.enable, flash.enabled):
        with pytest.raises(TypeError, match="positional argument"):
            switch(*arguments)
    assert not is_in()


def occupied():
    """What the process holds, after a garbage collection."""
    gc.collect()
    others = {"objects": len(gc.get_objects()), "finders": len(sys.meta_path), "filters": len(warnings.filters)}
    return held() | others


@promise("switching the patch leaves no memory, threads or files behind")
@pytest.mark.slow("8 seconds")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc; run this test on Linux")
def test_switched_many_times(original):
    """Memory, objects and threads do not grow if the patch is switched 500 times. mlx-lm gets its functions back."""
    x = mx.random.normal((1, 2, 12, 8))

    def switch(times):
        for _ in range(times):
            flash.enable(strict=True)
            mx.eval(qwen2.scaled_dot_product_attention(x, x, x, cache=None, scale=1.0, mask="causal"))
            flash.disable()  # raises if flash never ran
        return occupied()

    held = [switch(each) for each in (100, 250, 250)]
    grown = {name: held[-1][name] - held[0][name] for name in held[0]}
    assert base.scaled_dot_product_attention is qwen2.scaled_dot_product_attention is original
    del grown["resident"]
    resident = [each["resident"] for each in held]
    assert min(map(int.__sub__, resident[1:], resident)) < 5e5, resident  # the C library keeps memory now and then
    assert grown.pop("objects") < 100
    assert max(grown.values()) <= 0, grown


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_it_raises_and_stays_off(monkeypatch, mlx_own):
    monkeypatch.setattr(base, "create_causal_mask", lambda *arguments: None)
    with pytest.raises(flash.FlashFallbackWarning, match="create_causal_mask"):
        flash.enable(strict=True)
    assert not flash.status().enabled
    assert mx.fast.scaled_dot_product_attention is mlx_own
    model = nn.TransformerEncoder(1, 32, 4)
    with pytest.raises(flash.FlashFallbackWarning, match="create_causal_mask"):
        flash.patch_model(model)
    assert flash.status().instances == 0
    assert mx.fast.scaled_dot_product_attention is mlx_own
