"""Calls in compiled functions and on other streams are flash attention, too."""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

from tests.patch.arms import close, off_and_on


def test_a_compiled_function_keeps_what_it_was_traced_with(tiny, tokens):
    """A compiled graph keeps the attention that it was traced with, whether the patch is on or off when it runs.

    status() counts its kernels all the same. The test uses two functions, because MLX caches one graph per function.
    """
    model, x = tiny(), tokens()
    before, meanwhile = mx.compile(lambda x: model(x)), mx.compile(lambda x: model(x))
    mx.eval(before(x))
    with flash.enabled():
        mx.eval(meanwhile(x))
        mx.eval(before(x))
        assert flash.status().calls == {"cpu_prefill": 2}
    mx.eval(meanwhile(x))
    assert flash.status().calls == {"cpu_prefill": 4}


def test_a_fallback_in_a_compiled_function():
    """The patch counts the fallback, and warns of it, when MLX traces the function. With strict, tracing raises."""

    def attend(q):
        return base.scaled_dot_product_attention(q, q, q, None, 1.0, None)

    q = mx.ones((1, 2, 5, 600))
    with flash.enabled():
        compiled = mx.compile(lambda q: attend(q))
        with pytest.warns(flash.FlashFallbackWarning, match="head_dim over 512"):
            compiled(q)
        mx.eval(compiled(q), compiled(q))
    assert flash.status().fallbacks == {"head_dim over 512": 1}
    with pytest.raises(flash.FlashFallbackError), flash.enabled(strict=True):
        mx.compile(attend)(q)


def test_on_another_stream(tiny, tokens):
    model, x, stream = tiny(), tokens(1, 20), mx.new_stream(mx.cpu)

    def run():
        with mx.stream(stream):
            return model(x, cache=make_prompt_cache(model))

    off, on = off_and_on(run)
    assert close(on, off)
    assert flash.status().calls == {"cpu_prefill": 2}
