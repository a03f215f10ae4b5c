"""A small random model of each type in mlx-lm has the same logits with the patch as without, in prefill and decode.

A type that does not make its own caches is also tested with caches of limited size (max_kv_size). models.toml lists
the types and their caches.
"""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlxlm_flash_patch import mx_fast

from tests.patch.arms import close, leaves, logits
from tests.patch.model_configs import config, random_model
from tests.patch.model_types import model_types, supported
from tests.promises import promise

pytestmark = pytest.mark.usefixtures("uncompiled")

PROMPT, STEPS, MAX_KV_SIZE = 20, 4, 16
CALLS = (PROMPT, *[1] * STEPS)
UNTESTED = [name for name in supported() if model_types()[name].untested]
# Every test run includes these types, which cover all attention functions and all cache classes. The other types take
# turns: each run includes some of them.
ALWAYS = {
    *("qwen2", "gemma2", "gear", "phi3small", "plamo2", "deepseek_v41", "gemma3", "gpt_oss", "deepseek_v3", "llama4"),
    *("baichuan_m1", "recurrent_gemma", "qwen3_next", "iquestloopcoder"),
}


@promise("each model type gives the same logits, prefill and decode")
@pytest.mark.parametrize(
    "model_type",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.rotate(10))
        for name in supported()
        if name not in UNTESTED
    ],
)
def test_logits(model_type, tokens, monkeypatch):
    model, x = random_model(model_type, config(model_type)), tokens(1, PROMPT + STEPS)
    sizes = [None] if hasattr(model, "make_cache") else [None, MAX_KV_SIZE]
    caches = [make_prompt_cache(model, max_kv_size=size) for size in sizes for _ in range(2)]
    off = [logits(model, x, cache, *CALLS) for cache in caches[::2]]

    monkeypatch.setattr(mx_fast, "_call", lambda *_, **__: pytest.fail("MLX's own attention was called"))
    with flash.enabled(strict=True):
        on = [logits(model, x, cache, *CALLS) for cache in caches[1::2]]
        calls = flash.status().calls
    # Some types split a prompt into a batch of single queries. Then cpu_decode computes the prompt, too.
    in_all = sum(calls.values())
    assert calls["cpu_decode"] in (in_all, in_all * STEPS / (1 + STEPS))
    assert flash.status().fallbacks == {}
    for patched, unpatched in zip(on, off, strict=True):
        assert close(patched, unpatched)
        assert not mx.array_equal(patched, unpatched)  # equal bits would mean that attention does not affect the logits

    kinds = {type(cache).__name__ for made in caches for cache in leaves(made)}
    assert sorted(kinds) == list(model_types()[model_type].caches)

    flash.patch_model(model)
    assert mx.array_equal(logits(model, x, make_prompt_cache(model), *CALLS), on[0])


@pytest.mark.parametrize("model_type", UNTESTED)
def test_untested_types_say_why(model_type, tokens):
    """If a model type is not tested, models.toml quotes mlx-lm's own error as the reason."""
    with pytest.raises(RuntimeError) as caught:
        mx.eval(random_model(model_type, config(model_type))(tokens(1, PROMPT)))
    assert model_types()[model_type].untested in str(caught.value)
