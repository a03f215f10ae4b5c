"""Patched calls in other threads and on other streams are flash attention too; traced ones are not yet."""

import threading

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlxlm_flash_patch.route import TRACED


def test_a_compiled_function_falls_back(tiny, tokens):
    """While it is traced it cannot be told from a gradient; it is counted when traced, not with every run."""
    model, x = tiny(), tokens(1, 20)
    off = mx.compile(tiny())(x)
    with flash.enabled():
        compiled = mx.compile(model)
        with pytest.warns(flash.FlashFallbackWarning, match=r"mx\.compile"):
            assert mx.array_equal(compiled(x), off)
        assert mx.array_equal(compiled(x), off)
    assert flash.status().fallbacks == {TRACED: 2}
    assert flash.status().calls == {}


def test_strict_refuses_to_compile(tiny, tokens):
    with pytest.raises(flash.FlashFallbackError, match=r"mx\.compile"), flash.enabled(strict=True):
        mx.compile(tiny())(tokens(1, 20))


def test_vmapped(tiny):
    """vmap traces as well."""
    attention, x = tiny().layers[0].self_attn, mx.random.normal((3, 2, 12, 128), key=mx.random.key(0))
    off = mx.vmap(attention)(x)
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match=r"mx\.vmap"):
        assert mx.array_equal(mx.vmap(attention)(x), off)


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
