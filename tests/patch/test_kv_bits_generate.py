"""With kv_bits, mlx-lm's generation functions give the greedy tokens that mlx-lm's own QuantizedKVCache gives.

Where mlx-lm has none, for windows and batches, they give those of a single sequence, with the same bytes in the cache.
"""

import copy
import pickle

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models import cache as mlx_lm
from mlxlm_flash_patch.caches.quantized import Quantized

from tests.promises import promise

KV = {"kv_bits": 8, "kv_group_size": 32}
PROMPT = "Attention is all you need, and more than that"
PROMPTS = [list(PROMPT[:n].encode()) for n in (45, 3, 17, 9, 30)]


class NoEnd:
    """What batch_generate() needs of a tokenizer. No token ends a text."""

    eos_token_ids = ()

    def decode(self, ids):
        return str(ids)


def batches(model, lengths, **options):
    """Generates for PROMPTS, and then again from the caches of the first time."""
    options |= {"return_token_ids": True, "return_prompt_caches": True}
    first = batch_generate(model, NoEnd(), PROMPTS, None, lengths, **options)
    return first, batch_generate(model, NoEnd(), PROMPTS, first.caches, 8, **options)


@pytest.fixture
def on():
    with flash.enabled(strict=True, **KV):
        yield
    assert flash.status().fallbacks == {}


def steps(prompt, model, **options):
    options = {"max_tokens": 24, **options}
    return [(token, logprobs) for token, logprobs in generate_step(mx.array(prompt), model, **options)]


def equal(one, other):
    return all(a == b and mx.array_equal(x, y) for (a, x), (b, y) in zip(one, other, strict=True))


def rows(cache):
    """The rows that a quantised cache holds, the oldest first: weights, scales and biases of keys and of values."""
    stored = zip(*cache.keys_and_values(), strict=True)
    if not isinstance(cache, Quantized) or not hasattr(cache, "_temporal_order"):
        return [x for pair in stored for x in pair]
    return [part._temporal_order(x) for part, pair in zip(cache.parts(), stored, strict=True) for x in pair]


def same_rows(caches, others):
    """Whether caches of two runs hold the same bytes."""
    return all(map(mx.array_equal, (x for c in caches for x in rows(c)), (x for c in others for x in rows(c))))


@promise("kv_bits gives the tokens and bytes of mlx-lm's own QuantizedKVCache")
@pytest.mark.parametrize("prefill_step_size", [2048, 8])
def test_as_mlx_lms_own(tiny, tokens, on, prefill_step_size):
    model, prompt = tiny(), tokens(1, 30)[0]
    own = [mlx_lm.QuantizedKVCache(32, 8) for _ in model.layers]
    ours = mlx_lm.make_prompt_cache(model)
    expected = steps(prompt, model, prompt_cache=own, prefill_step_size=prefill_step_size)
    assert equal(steps(prompt, model, prompt_cache=ours, prefill_step_size=prefill_step_size), expected)
    assert same_rows(ours, own)
    assert all(one.nbytes == other.nbytes for one, other in zip(ours, own, strict=True))


@pytest.mark.parametrize("start", [0, 1, 20, 29, 30, 40, 100])
def test_quantized_kv_start(tiny, tokens, start):
    """The cache is quantised between the same two calls of the model as with mlx-lm's own --quantized-kv-start."""
    model, prompt = tiny(), tokens(1, 30)[0]
    with flash.enabled(strict=True):
        caches = mlx_lm.make_prompt_cache(model)
        expected = steps(prompt, model, prompt_cache=caches, quantized_kv_start=start, prefill_step_size=8, **KV)
    with flash.enabled(strict=True, quantized_kv_start=max(start, 1), **KV):
        ours = mlx_lm.make_prompt_cache(model)
        assert equal(steps(prompt, model, prompt_cache=ours, prefill_step_size=8), expected)
    assert same_rows(ours, caches)


def test_mlx_lms_own_option_quantises_nothing_again(tiny, tokens, on):
    model, prompt = tiny("llama"), tokens(1, 30)[0]
    caches = [mlx_lm.make_prompt_cache(model) for _ in range(2)]
    expected = steps(prompt, model, prompt_cache=caches[0])
    options = {"kv_bits": 4, "kv_group_size": 64, "quantized_kv_start": 0}
    assert equal(steps(prompt, model, prompt_cache=caches[1], **options), expected)
    assert same_rows(*caches)


@promise("with kv_bits, batches give each sequence's own tokens")
@pytest.mark.rotate(1, default=2)
@pytest.mark.parametrize("max_kv_size", [None, 128], ids=lambda n: f"max_kv_size {n}")
def test_batches(architecture, tiny, on, max_kv_size):
    """Prompts have different lengths, and do not all fit into one batch. A second call continues from their caches.

    The rows of the first layer do not depend on attention, so they have the same bytes. Later ones depend on the order
    in which a batch adds numbers, by which a few are rounded to another number of 8 bits.
    """
    model = tiny(architecture, vocab_size=257)
    lengths = [12, 20, 4, 9, 15]
    first, second = batches(model, lengths, completion_batch_size=3, prefill_batch_size=2, max_kv_size=max_kv_size)
    for i, prompt in enumerate(PROMPTS):
        cache = mlx_lm.make_prompt_cache(model, max_kv_size)
        alone = steps(prompt, model, prompt_cache=cache, max_tokens=lengths[i])
        assert first.token_ids[i] == [token for token, _ in alone]
        assert same_rows(first.caches[i][:1], cache[:1])
        assert all(
            mx.mean(a == b) > 0.98 for a, b in zip(rows(first.caches[i][1])[:2], rows(cache[1])[:2], strict=True)
        )
        more = steps(prompt, model, prompt_cache=cache, max_tokens=8)
        assert second.token_ids[i] == [token for token, _ in more]


@pytest.mark.parametrize("start", [10, 30, 1000])
def test_quantized_kv_start_in_batches(tiny, start):
    """Batches with sequences that are longer and shorter than `start`."""
    model = tiny("llama", vocab_size=257)
    with flash.enabled(strict=True, quantized_kv_start=start, **KV):
        first, second = batches(model, [12, 20, 4, 9, 15], completion_batch_size=3, prefill_batch_size=2)
    if start == 1000:  # nothing is quantised
        assert all(not hasattr(cache, "bits") for caches in first.caches for cache in caches)
        with flash.enabled(strict=True):
            expected = batches(model, [12, 20, 4, 9, 15], completion_batch_size=3, prefill_batch_size=2)
        assert [first.token_ids, second.token_ids] == [batch.token_ids for batch in expected]
    else:
        assert first.caches[0][1].bits == 8
        assert [len(ids) for ids in first.token_ids] == [12, 20, 4, 9, 15]


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "falcon_h1", "deepseek_v3"])
def test_prompt_cache_files(tiny, tokens, tmp_path, model_type):
    model, x = tiny(model_type, qk_rope_head_dim=32), tokens(1, 30)
    file = str(tmp_path / "cache.safetensors")
    with flash.enabled(**KV), pytest.warns() if model_type == "falcon_h1" else flash.enabled():
        caches = mlx_lm.make_prompt_cache(model)
    with flash.enabled():
        mx.eval(model(x, cache=caches), [cache.state for cache in caches])
        mlx_lm.save_prompt_cache(file, caches)
        read = mlx_lm.load_prompt_cache(file)
        assert mx.array_equal(model(x[:, :1], cache=read), model(x[:, :1], cache=caches))
    if model_type == "qwen2":  # mlx-lm's own classes can read it, and did write it
        assert type(read[0]) is mlx_lm.QuantizedKVCache


def test_a_new_process_can_read_prompt_cache_files(command, light):
    """load_prompt_cache() finds the classes that a file names, even if the process has made no cache."""
    code = """
import mlxlm_flash_patch as flash
flash.enable(kv_bits=8)
from mlx_lm.models import cache
print(set(flash.caches.__all__) - vars(cache).keys())
"""
    assert command("python", "-c", code, env=light).stdout == "set()\n"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_of_caches_that_hold_16_bits(tiny, tokens, again):
    """The next call of the model quantises copies, too. from_state() makes what is read from a file: mlx-lm's class."""
    model, x = tiny("llama"), tokens(1, 20)
    with flash.enabled(quantized_kv_start=20, **KV):
        caches = mlx_lm.make_prompt_cache(model)
        model(x, cache=caches)
        copies, read = [again(cache) for cache in caches], [type(cache).from_state(cache.state) for cache in caches]
        assert mx.array_equal(model(x[:, :1], cache=copies), model(x[:, :1], cache=caches))
        model(x[:, :1], cache=read)
    assert [type(cache) for cache in copies] == [type(cache) for cache in caches]
    assert [type(cache) for cache in read] == [mlx_lm.RotatingKVCache, mlx_lm.KVCache]
