"""mlx-lm's own generation loops give the same greedy tokens."""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step


def greedy(model, prompt, **options):
    return [token for token, _ in generate_step(prompt, model, max_tokens=24, **options)]


@pytest.mark.parametrize(
    "options", [{}, {"max_kv_size": 16}, {"prefill_step_size": 8}], ids=["plain", "max_kv_size", "prefill_step_size"]
)
def test_generate_step(architecture, tiny, tokens, options):
    model, prompt = tiny(architecture), tokens(1, 20)[0]
    off = greedy(model, prompt, **options)
    with flash.enabled(strict=True):
        on = greedy(model, prompt, **options)
    assert on == off
    assert flash.status().calls["cpu_decode"] >= 2 * 24


def test_speculative_decoding(tiny, tokens):
    """The draft's tokens are verified a few at a time: short causal queries against a long cache."""
    model, draft, prompt = tiny(seed=0), tiny(seed=1), tokens(1, 20)[0]

    def generate():
        return [token for token, *_ in speculative_generate_step(prompt, model, draft, max_tokens=16)]

    off = generate()
    with flash.enabled(strict=True):
        on = generate()
    assert on == off == greedy(model, mx.array(prompt))[:16]
