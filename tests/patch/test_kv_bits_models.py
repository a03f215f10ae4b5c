"""Models of all kinds compute with quantised caches what they compute with rounded keys and values, also in batches."""

import copy
import warnings

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import cache as mlx_lm
from mlxlm_flash_patch import router
from mlxlm_flash_patch.caches.quantized import Quantized

from tests.patch.arms import close, leaves, logits
from tests.patch.model_configs import config, random_model
from tests.patch.test_kv_bits import kinds
from tests.promises import promise

pytestmark = pytest.mark.usefixtures("uncompiled")

KV = {"kv_bits": 8, "kv_group_size": 32}
# They cover plain, rotating and chunked caches, lists of caches, recurrent layers, sinks, latents, layers that share
# keys, values of another size than keys, and attention that the model writes out.
TYPES = {
    "qwen2": "QuantizedKVCache",
    "llama": "QuantizedRotatingKVCache QuantizedKVCache",
    "qwen3": "QuantizedKVCache",
    "gemma3_text": "QuantizedRotatingKVCache QuantizedKVCache",
    "gpt_oss": "QuantizedRotatingKVCache QuantizedKVCache",
    "llama4": "QuantizedChunkedKVCache QuantizedKVCache",
    "mimo_v2_flash": "QuantizedRotatingKVCache QuantizedKVCache",
    "minicpm3": "QuantizedKVCache",
    "mixtral": "QuantizedKVCache",
    "iquestloopcoder": "QuantizedRotatingKVCache QuantizedKVCache",
    "gemma3n": "QuantizedRotatingKVCache QuantizedKVCache",
    "hunyuan": "QuantizedKVCache",
    "baichuan_m1": "ArraysCache QuantizedRotatingKVCache QuantizedKVCache",
    "falcon_h1": "ArraysCache QuantizedKVCache",
    "qwen3_next": "ArraysCache QuantizedKVCache",
    "recurrent_gemma": "ArraysCache QuantizedRotatingKVCache",
    "phi3small": "KVCache QuantizedKVCache",
    "gemma2": "KVCache",
    "deepseek_v3": "QuantizedLatentKVCache",
    "kimi_linear": "ArraysCache QuantizedLatentKVCache",
    "longcat_flash": "QuantizedLatentKVCache",
}
WIDE = {"hidden_size": 128, "head_dim": 32, "swa_head_dim": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
WIDE |= {"v_head_dim": 32, "num_kv_shared_layers": 1}
OWN = {
    "mimo_v2_flash": {"v_head_dim": 64, "swa_v_head_dim": 64},
    "gemma3n": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "intermediate_size": [48] * 4,
    },
}
HOW = {"group_size": 32, "bits": 8}
LENGTHS = (13, 4, 9)


@pytest.fixture(params=TYPES)
def model_type(request):
    return request.param


@pytest.fixture
def model(model_type):
    small = config(model_type)
    wide = {**WIDE, **OWN.get(model_type, {})}
    for fields in (small, small.get("text_config", {})):
        fields.update({name: value for name, value in wide.items() if name in fields})
    return random_model(model_type, small)


def made(model, max_kv_size=None):
    """The model's quantised caches."""
    with flash.enabled(**KV), warnings.catch_warnings():
        warnings.simplefilter("ignore", flash.FlashFallbackWarning)  # of layers that keep 16 bits
        return mlx_lm.make_prompt_cache(model, max_kv_size)


@pytest.fixture
def quantisations(monkeypatch):
    """Lists the results of mx.quantize()."""
    own, seen = mx.quantize, []

    def quantize(*arguments, **options):
        seen.append(own(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(mx, "quantize", quantize)
    return seen


def rounding(own, quantised):
    """Makes a cache of mlx-lm round keys and values, in turn, to the numbers in `quantised`.

    These are the numbers of a run with the patch. A number that is halfway between two of 8 bits may be rounded to the
    other here, because of rounding errors before.
    """

    def rounded(x):
        weights, scales, biases = quantised.pop(0)
        expected = mx.quantize(x, **HOW)
        near = mx.dequantize(weights, scales, biases, **HOW)
        assert mx.all(mx.abs(near - mx.dequantize(*expected, **HOW)) < 1.01 * mx.abs(mx.repeat(scales, 32, axis=-1)))
        assert mx.mean(weights == expected[0]) > 0.9
        return near

    write = own.update_and_fetch
    own.update_and_fetch = lambda keys, values: write(rounded(keys), rounded(values))


@promise("with kv_bits, each kind of model computes as with rounded keys and values")
@pytest.mark.parametrize("max_kv_size", [None, 12], ids=lambda n: f"max_kv_size {n}")
def test_one_sequence(model, model_type, tokens, quantisations, max_kv_size):
    """MLX's own attention over rounded keys and values, without the patch, gives the same logits."""
    if max_kv_size and hasattr(model, "make_cache"):
        pytest.skip("this model makes its own caches, whatever max_kv_size is")
    caches, own = made(model, max_kv_size), mlx_lm.make_prompt_cache(model, max_kv_size)
    if max_kv_size is None:
        assert {type(cache).__name__ for cache in leaves(caches)} == set(TYPES[model_type].split())
    x, lengths = tokens(1, 30), (20, *[1] * 4, 3, *[1] * 3)
    quantisations.clear()  # of the trial
    with flash.enabled(strict=True):
        on = logits(model, x, caches, *lengths)
    rounded = list(quantisations)
    for cache, plain in zip(leaves(caches), leaves(own), strict=True):
        if isinstance(cache, Quantized):
            rounding(plain, rounded)
    assert close(on, logits(model, x, own, *lengths))
    assert not rounded


def test_batches(model, model_type, tokens):
    """Three sequences, merged into a batch, get the logits of each alone. Then one of them leaves."""
    if model_type == "phi3small":
        pytest.skip("mlx-lm counts the blocks of phi3small's sparse attention from the padding")
    x = tokens(3, 40)
    with flash.enabled(strict=True):
        singles = [made(model) for _ in LENGTHS]
        if not all(hasattr(cache, "merge") for cache in singles[0]):
            pytest.skip("mlx-lm cannot batch the caches of this model")
        for row, caches, length in zip(x, singles, LENGTHS, strict=True):
            logits(model, row[None], caches, length)
        batch = [copy.deepcopy(caches[0]).merge(list(caches)) for caches in zip(*singles, strict=True)]
        expected = [logits(model, row[None, 20:], caches, *[1] * 6) for row, caches in zip(x, singles, strict=True)]
        assert close(logits(model, x[:, 20:], batch, *[1] * 6), mx.concatenate(expected))

        for cache in batch:
            cache.filter([2, 0])
        kept = [singles[2], singles[0]]
        steps = [logits(model, row[None], caches, 1, 1) for row, caches in zip((x[2], x[0]), kept, strict=True)]
        assert close(logits(model, mx.stack([x[2], x[0]]), batch, 1, 1), mx.concatenate(steps))
        for i, caches in enumerate(kept):
            extracted = [cache.extract(i) for cache in batch]
            assert kinds(extracted) == kinds(caches)
            assert close(logits(model, x[:1], extracted, 2, 1), logits(model, x[:1], caches, 2, 1))


def test_latent_vectors_are_read_as_they_are_stored(tiny, tokens):
    """In a decode step the latent vectors are both key and value. For a prompt, the model computes keys and values."""
    model, x, seen = tiny("deepseek_v3", qk_rope_head_dim=32), tokens(), []
    caches = made(model)
    with flash.enabled(strict=True), router.observed(lambda arguments: seen.append(arguments.call)):
        logits(model, x, caches, 12, 1, 1)
    assert [(call.bits, call.query_len, call.key_len) for call in seen[::2]] == [(0, 12, 12), (8, 1, 13), (8, 1, 14)]


@pytest.mark.parametrize("max_kv_size", [None, 8])
def test_caches_after_the_patch_is_off(tiny, tokens, max_kv_size):
    """mlx-lm's own attention reads the caches, except latent ones, which need the patch's."""
    model, x = tiny(num_hidden_layers=1), tokens()
    caches, same = made(model, max_kv_size), made(model, max_kv_size)
    with flash.enabled(strict=True):
        on = logits(model, x, caches, 12, 1, 1)
    assert close(logits(model, x, same, 12, 1, 1), on)
