"""Every figure again, by a slow way that shares no code with flash_evals: mlx-lm's model reads for each scored token
what the rules let it see of the text, and nothing else; the rules from their definitions, the sums in float64.
"""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from tokenizers import Tokenizer


@pytest.fixture
def tokens(model_folder):
    """Of a text, behind a BOS or not."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    prefix = {"always": [tokenizer.token_to_id("<|endoftext|>")], "never": []}
    return lambda text, bos: prefix[bos] + tokenizer.encode(text).ids


@pytest.fixture
def cost(model_folder):
    """-ln p(token | seen)."""
    model, _ = load_model(model_folder)

    def cost(seen, token):
        logits = np.array(model(mx.array([seen]))[0, -1], np.float64)
        return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])

    return cost


def check(result, costs, texts):
    """To 1e-6 nats a token: 4 decimals of a perplexity around 30."""
    total, tokens = math.fsum(costs), len(costs)
    units = {"ppl": tokens}
    if texts:
        words, n_bytes = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
        units |= {"word_ppl": words, "byte_ppl": n_bytes}
    assert result["tokens"] == tokens
    for arm in (result["off"], result["on"]):
        for figure, count in units.items():
            assert math.log(arm[figure]) == pytest.approx(total / count, abs=1e-6 * max(1, tokens / count))
        assert arm["ppl_se"] / arm["ppl"] == pytest.approx(np.std(costs, ddof=1) / math.sqrt(tokens), rel=1e-5)
        bits = pytest.approx(total / n_bytes / math.log(2), abs=1e-6) if texts else None
        assert arm["bits_per_byte"] == bits
        assert texts or (arm["word_ppl"], arm["byte_ppl"]) == (None, None)


@pytest.mark.rotate(4)
@pytest.mark.parametrize("bos", ["always", "never"])
@pytest.mark.parametrize(("context", "stride"), [(128, 128), (32, 32), (32, 9), (5, 1), (2, 2)])
@pytest.mark.parametrize("reading", ["joined", "separate"])
def test_rolling(evaluate_documents, cost, tokens, documents, reading, context, stride, bos):
    texts = ["\n\n".join(documents)] if reading == "joined" else documents
    streams, costs = {text: tokens(text, bos) for text in texts}, []
    for ids in streams.values():
        for token in range(1, len(ids)):
            # The first window scores `context` tokens, and each later one `stride`: this one's, and where it ends.
            number = max(0, math.ceil((token - context) / stride))
            last = min(context + number * stride, len(ids) - 1)
            costs.append(cost(ids[max(0, last - context) : token], ids[token]))
    result = evaluate_documents("--documents", reading, "--context", context, "--stride", stride, "--bos", bos)
    check(result, costs, [text for text, ids in streams.items() if len(ids) > 1])


@pytest.mark.parametrize("bos", ["always", "never"])
@pytest.mark.parametrize("n_ctx", [3, 16, 33, 128])
def test_half(evaluate_documents, cost, tokens, documents, n_ctx, bos):
    ids, costs = tokens("\n\n".join(documents), bos), []
    for start in range(0, len(ids) - n_ctx + 1, n_ctx):
        chunk = [ids[0 if bos == "always" else start], *ids[start + 1 : start + n_ctx]]
        costs += [cost(chunk[:token], chunk[token]) for token in range(n_ctx // 2 + 1, n_ctx)]
    check(evaluate_documents("--scoring", "half", "--context", n_ctx, "--bos", bos), costs, None)
