"""mlx-lm's generation functions give the same greedy tokens with the patch as without it."""

import mlxlm_flash_patch as flash
import pytest
from mlx_lm.generate import batch_generate, stream_generate

from tests.patch.arms import off_and_on
from tests.promises import promise


@promise("generation gives the same greedy tokens, also with draft models")
@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
        {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 24},  # quantised once the cache has 24 tokens
    ],
    ids=["plain", "kv_bits 8", "kv_bits 4"],
)
@pytest.mark.parametrize("drafted", [False, True], ids=["alone", "with a draft model"])
def test_stream_generate(tiny, tokenizer, drafted, options):
    """With a draft model, the large model gets a few queries at a time, with a causal mask over a longer cache."""
    model = tiny(vocab_size=257)
    draft = tiny(vocab_size=257, num_hidden_layers=1) if drafted else None

    def texts():
        responses = stream_generate(model, tokenizer, "Attention is", 32, draft, **options)
        return [(r.token, r.text, r.from_draft) for r in responses]

    off, on = off_and_on(texts)
    assert on == off


@pytest.mark.rotate(1, default=5)
@pytest.mark.parametrize("max_kv_size", [None, 16], ids=lambda n: f"max_kv_size {n}")
def test_batch_generate(architecture, tiny, tokenizer, max_kv_size):
    """Prompts have different lengths, and do not all fit into one batch. A second call continues from their caches."""
    model = tiny(architecture, vocab_size=257)
    prompts = [tokenizer.encode("Attention is all you need, and more than that"[:n]) for n in (45, 3, 17, 9, 30)]

    def texts():
        options = {"max_kv_size": max_kv_size, "completion_batch_size": 3, "prefill_batch_size": 2}
        options |= {"return_token_ids": True, "return_prompt_caches": True}
        first = batch_generate(model, tokenizer, prompts, None, [12, 20, 4, 9, 15], **options)
        second = batch_generate(model, tokenizer, prompts, first.caches, 8, **options)
        return first.token_ids, second.token_ids

    off, on = off_and_on(texts)
    assert on == off
    assert flash.status().calls["cpu_decode"] >= 2 * 20
