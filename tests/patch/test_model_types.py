"""Each model type of mlx-lm, small and random: the patched logits are the unpatched ones, prefill and decode.

With each kind of cache that the type makes, and where mlx-lm lets the user choose, with `--max-kv-size`, beyond its
end. models.toml says which types, and which caches those are.
"""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlxlm_flash_patch.registry import model_types, supported
from model_configs import config

PROMPT, STEPS, MAX_KV_SIZE = 20, 4, 16
UNTESTED = [name for name in supported() if model_types()[name].untested]


@pytest.fixture(autouse=True)
def uncompiled():
    """MLX compiles on the CPU with a C++ compiler, a second or more for each function."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def only_flash(monkeypatch):
    """only_flash(): from then on MLX's own attention is an error."""

    def never(*args, **kwargs):
        raise AssertionError("mx.fast.scaled_dot_product_attention was called")

    return lambda: monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", never)


def logits(model, tokens, cache):
    """Of a prompt at once, and then token by token."""
    parts = [model(tokens[:, :PROMPT], cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(PROMPT, PROMPT + STEPS)]
    out = mx.concatenate(parts, axis=1)
    mx.eval(out)
    return out


def kinds(caches):
    for cache in caches:
        yield from kinds(cache.caches) if isinstance(cache, CacheList) else [type(cache).__name__]


def close(one, other):
    """Within 1e-4 of the largest logit. Some types hide tokens: their logits are -inf in both."""
    hidden = other == -mx.inf
    assert mx.array_equal(one == -mx.inf, hidden)
    one, other = mx.where(hidden, 0, one), mx.where(hidden, 0, other)
    return mx.abs(one - other).max().item() < 1e-4 * mx.abs(other).max().item()


@pytest.mark.parametrize("model_type", [name for name in supported() if name not in UNTESTED])
def test_logits(model_type, make_model, tokens, only_flash):
    model = make_model(model_type, config(model_type))
    x = tokens(1, PROMPT + STEPS)
    sizes = [None] if hasattr(model, "make_cache") else [None, MAX_KV_SIZE]
    caches = [make_prompt_cache(model, max_kv_size=size) for size in sizes for _ in range(2)]
    off = [logits(model, x, cache) for cache in caches[::2]]

    only_flash()
    with flash.enabled(model_type, strict=True):
        on = [logits(model, x, cache) for cache in caches[1::2]]
        calls = flash.status().calls
    # Some types take a prompt as so many batches of one query.
    in_all = sum(calls.values())
    assert calls["cpu_decode"] in (in_all, in_all * STEPS / (1 + STEPS))
    assert flash.status().fallbacks == {}
    for patched, unpatched in zip(on, off, strict=True):
        assert close(patched, unpatched)
        assert not mx.array_equal(patched, unpatched)  # attention matters to them

    assert sorted(set(kinds(cache for made in caches for cache in made))) == list(model_types()[model_type].caches)

    flash.patch_model(model)
    # Not to the bit: masks are arrays then, where enable() has descriptions of them, and tiles begin elsewhere.
    assert close(logits(model, x, make_prompt_cache(model)), on[0])


@pytest.mark.parametrize("model_type", UNTESTED)
def test_untested_types_say_why(model_type, make_model, tokens):
    """The reason is what mlx-lm itself says, when such a model is tried."""
    with pytest.raises(RuntimeError) as caught:
        logits(make_model(model_type, config(model_type)), tokens(1, PROMPT + STEPS), None)
    assert model_types()[model_type].untested in str(caught.value)
