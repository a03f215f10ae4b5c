"""Recomputes the figures of `flash-eval perplexity` slowly, without code of flash_evals, with sums in float64.

For each scored token, mlx-lm's model reads only those earlier tokens that the scoring rules allow it to see.
"""

import math
import re

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from tests.promises import promise


@pytest.fixture
def tokens(model_folder):
    """tokens(text, bos): the text's tokens, after a BOS if `bos` is "always"."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    prefix = {"always": [tokenizer.token_to_id("<|endoftext|>")], "never": []}
    return lambda text, bos: prefix[bos] + tokenizer.encode(text).ids


@pytest.fixture
def cost(model_folder):
    """cost(seen, token): -ln p(token | seen)."""
    model, _ = load_model(model_folder)

    def cost(seen, token):
        logits = np.array(model(mx.array([seen]))[0, -1], np.float64)
        return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])

    return cost


def check(result, costs, words, n_bytes):
    """Figures agree to 1e-6 nats per token. This error changes a perplexity of 30 by 3e-5."""
    total, tokens = math.fsum(costs), len(costs)
    assert (result["tokens"], result["words"], result["bytes"]) == (tokens, words, n_bytes)
    for arm in (result["off"], result["on"]):
        for figure, count in {"ppl": tokens, "word_ppl": words, "byte_ppl": n_bytes}.items():
            logarithm = arm[figure] and math.log(arm[figure])
            assert logarithm == (count and pytest.approx(total / count, abs=1e-6 * max(1, tokens / count)))
        assert arm["ppl_se"] / arm["ppl"] == pytest.approx(np.std(costs, ddof=1) / math.sqrt(tokens), rel=1e-5)
        assert arm["bits_per_byte"] == (pytest.approx(total / n_bytes / math.log(2), abs=1e-6) if n_bytes else None)


@promise("perplexity's figures equal those of a slow implementation that shares no code")
@pytest.mark.rotate(4, default=20)
@pytest.mark.parametrize("bos", ["always", "never"])
@pytest.mark.parametrize(("context", "stride"), [(128, 128), (32, 32), (32, 9), (5, 1), (2, 2)])
@pytest.mark.parametrize("reading", ["joined", "separate"])
def test_rolling(evaluate_documents, cost, tokens, documents, reading, context, stride, bos):
    texts = ["\n\n".join(documents)] if reading == "joined" else documents
    streams, costs = {text: tokens(text, bos) for text in texts}, []
    for ids in streams.values():
        for token in range(1, len(ids)):
            # The first window scores up to `context` tokens. Each later window scores up to `stride` tokens. `last` is
            # the last token of the window that scores `token`.
            number = max(0, math.ceil((token - context) / stride))
            last = min(context + number * stride, len(ids) - 1)
            costs.append(cost(ids[max(0, last - context) : token], ids[token]))
    result = evaluate_documents("--documents", reading, "--context", context, "--stride", stride, "--bos", bos)
    read = [text for text, ids in streams.items() if len(ids) > 1]
    check(result, costs, sum(len(text.split()) for text in read), sum(len(text.encode()) for text in read))
    assert (", documents one by one · " in result["page"]) is (reading == "separate")
    if reading == "separate" and context == 128:  # the padding of shorter windows does not count
        assert sum(trial["tokens"] for trial in result["trials"]) == result["tokens"]


@promise("the figures of llama-perplexity's scoring equal those of a slow implementation")
@pytest.mark.slow("4 seconds")
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize("bos", ["always", "never"])
@pytest.mark.parametrize("n_ctx", [3, 16, 33, 128])
def test_half(evaluate_documents, cost, tokens, documents, n_ctx, bos):
    ids, costs = tokens("\n\n".join(documents), bos), []
    for start in range(0, len(ids) - n_ctx + 1, n_ctx):
        chunk = [ids[0 if bos == "always" else start], *ids[start + 1 : start + n_ctx]]
        costs += [cost(chunk[:token], chunk[token]) for token in range(n_ctx // 2 + 1, n_ctx)]
    result = evaluate_documents("--scoring", "half", "--context", n_ctx, "--bos", bos)
    check(result, costs, None, None)
    assert result["settings"]["stride"] is None
    assert f"context {n_ctx}, second half of each chunk scored, as llama-perplexity does, " in result["page"]
    assert re.search(r"word / byte perplexity +– / – +– / –\nbits per byte +– +–\n", result["page"])
