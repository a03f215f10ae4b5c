"""Patched calls in other threads, on other streams and in traced functions are flash attention too."""

import threading

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache


def test_a_compiled_function(tiny, tokens):
    model, x = tiny(), tokens(1, 20)
    off = mx.compile(tiny())(x)
    with flash.enabled(strict=True):
        compiled = mx.compile(model)
        for _ in range(2):
            assert mx.allclose(compiled(x), off, rtol=1e-4, atol=1e-4)
    assert flash.status().calls == {"cpu_prefill": 4}


def test_a_compiled_function_keeps_what_it_was_traced_with(tiny, tokens):
    """The patch cannot reach into a graph; what runs in it is counted all the same.

    MLX keeps graphs by function: compiling the same one again gives the same graph.
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
    """It is counted and warned about when it is traced, and raises there under strict."""

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


def test_fallbacks_and_strict_reach_other_threads():
    q, raised = mx.ones((1, 2, 5, 600)), []

    def work():
        try:
            base.scaled_dot_product_attention(q, q, q, None, 1.0, None)
        except flash.FlashFallbackError as error:
            raised.append(error)

    flash.enable(strict=True)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with pytest.raises(flash.FlashNeverRanError):
        flash.disable()
    assert len(raised) == 1
    assert flash.status().fallbacks == {"head_dim over 512": 1}


def test_vmapped(tiny):
    attention, x = tiny().layers[0].self_attn, mx.random.normal((3, 2, 12, 128), key=mx.random.key(0))
    off = mx.vmap(attention)(x)
    with flash.enabled(strict=True):
        assert mx.allclose(mx.vmap(attention)(x), off, rtol=1e-4, atol=1e-5)


def test_in_threads(tiny, tokens):
    """Threads that generate at the same time get what each gets alone."""
    models = [tiny(seed=seed) for seed in range(4)]

    def generate(model, into):
        into[id(model)] = [t for t, _ in generate_step(tokens(1, 16)[0], model, max_tokens=12)]

    def all_at_once():
        results = {}
        threads = [threading.Thread(target=generate, args=(model, results)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    off = all_at_once()
    with flash.enabled(strict=True):
        on = all_at_once()
    assert on == off
    assert len(on) == 4
    assert flash.status().calls["cpu_decode"] >= 4 * 2 * 12


def test_on_another_stream(tiny, tokens):
    model, x = tiny(), tokens(1, 20)
    off = model(x)
    with flash.enabled(strict=True), mx.stream(mx.new_stream(mx.cpu)):
        on = model(x, cache=make_prompt_cache(model))
        mx.eval(on)
    assert mx.allclose(on, off, rtol=1e-4, atol=1e-4)
    assert flash.status().calls == {"cpu_prefill": 2}
