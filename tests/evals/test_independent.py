"""Every figure again, by a slow way that shares no code with flash_evals.

A Qwen2 in numpy, in float64, from its weights, its definition and the core's reference of attention; one forward for
each scored token, over the tokens that the rules let it see; the rules from their definitions.
"""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.masks import Causal
from flashattn_core.reference import reference_attention
from tokenizers import Tokenizer


def dense(x, weight):
    """Without BLAS: on a busy machine its threads spend most of their time waiting for each other."""
    return np.einsum("...i,oi->...o", x, weight)


class Qwen2:
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        weights = mx.load(str(folder / "model.safetensors"))
        assert isinstance(weights, dict)
        self.weights = {name: np.array(weight.astype(mx.float32), np.float64) for name, weight in weights.items()}
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(self, text, bos):
        prefix = [self.tokenizer.token_to_id("<|endoftext|>")] if bos == "always" else []
        return prefix + self.tokenizer.encode(text).ids

    def cost(self, seen, token):
        """-ln p(token | seen)."""
        logits = self._logits(np.array(seen))
        return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])

    def _logits(self, ids):
        """Of the token that follows the last one."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            own = {
                name.removeprefix(prefix): weight for name, weight in self.weights.items() if name.startswith(prefix)
            }
            x = x + self._attention(own, self._norm(x, own["input_layernorm.weight"]))
            h = self._norm(x, own["post_attention_layernorm.weight"])
            gate, up = dense(h, own["mlp.gate_proj.weight"]), dense(h, own["mlp.up_proj.weight"])
            x = x + dense(gate / (1 + np.exp(-gate)) * up, own["mlp.down_proj.weight"])
        return dense(self._norm(x[-1], self.weights["model.norm.weight"]), self.weights["model.embed_tokens.weight"])

    def _norm(self, x, weight):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def _attention(self, own, x):
        n, dim = len(x), self.config["hidden_size"] // self.config["num_attention_heads"]
        query, key, value = (
            (dense(x, own[f"self_attn.{name}_proj.weight"]) + own[f"self_attn.{name}_proj.bias"]).reshape(n, -1, dim)
            for name in "qkv"
        )
        heads_first = [array.swapaxes(0, 1)[None] for array in (self._rotated(query), self._rotated(key), value)]
        [output], _ = reference_attention(*heads_first, mask=Causal())
        return dense(output.swapaxes(0, 1).reshape(n, -1), own["self_attn.o_proj.weight"])

    def _rotated(self, x):
        """The halves of each head as real and imaginary part, turned by position · theta^(-2k / dim)."""
        n, _, dim = x.shape
        angles = np.outer(np.arange(n), self.config["rope_theta"] ** (-np.arange(0, dim, 2) / dim))
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)


def rolling(model, ids, context, stride):
    """Of each token but the first."""
    for token in range(1, len(ids)):
        # The first window scores `context` tokens, and each later one `stride`: this one's, and where it ends.
        number = max(0, math.ceil((token - context) / stride))
        last = min(context + number * stride, len(ids) - 1)
        yield model.cost(ids[max(0, last - context) : token], ids[token])


def half(model, ids, n_ctx, bos):
    for chunk in range(len(ids) // n_ctx):
        tokens = ids[chunk * n_ctx : (chunk + 1) * n_ctx]
        if bos:
            tokens[0] = ids[0]
        for position in range(n_ctx // 2, n_ctx - 1):
            yield model.cost(tokens[: position + 1], tokens[position + 1])


def check(result, costs, texts):
    """To 1e-6 nats a token: 4 decimals of a perplexity around 30."""
    total, tokens = math.fsum(costs), len(costs)
    assert result["tokens"] == tokens
    for arm in (result["off"], result["on"]):
        assert math.log(arm["ppl"]) == pytest.approx(total / tokens, abs=1e-6)
        assert arm["ppl_se"] / arm["ppl"] == pytest.approx(np.std(costs, ddof=1) / math.sqrt(tokens), rel=1e-5)
        if texts is None:
            assert (arm["word_ppl"], arm["byte_ppl"], arm["bits_per_byte"]) == (None, None, None)
            continue
        words, n_bytes = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
        assert math.log(arm["word_ppl"]) == pytest.approx(total / words, abs=1e-6 * tokens / words)
        assert math.log(arm["byte_ppl"]) == pytest.approx(total / n_bytes, abs=1e-6)
        assert arm["bits_per_byte"] == pytest.approx(total / n_bytes / math.log(2), abs=1e-6)


@pytest.mark.rotate(4)
@pytest.mark.parametrize("bos", ["always", "never"])
@pytest.mark.parametrize(("context", "stride"), [(128, 128), (32, 32), (32, 9), (5, 1), (2, 2)])
@pytest.mark.parametrize("reading", ["joined", "separate"])
def test_rolling(evaluate_documents, model_folder, documents, reading, context, stride, bos):
    model = Qwen2(model_folder)
    texts = ["\n\n".join(documents)] if reading == "joined" else documents
    ids = {text: model.tokens(text, bos) for text in texts}
    costs = [cost for text in texts for cost in rolling(model, ids[text], context, stride)]
    result = evaluate_documents("--documents", reading, "--context", context, "--stride", stride, "--bos", bos)
    check(result, costs, [text for text in texts if len(ids[text]) > 1])


@pytest.mark.parametrize("bos", ["always", "never"])
@pytest.mark.parametrize("n_ctx", [3, 16, 33, 128])
def test_half(evaluate_documents, model_folder, documents, n_ctx, bos):
    model = Qwen2(model_folder)
    costs = list(half(model, model.tokens("\n\n".join(documents), bos), n_ctx, bos == "always"))
    check(evaluate_documents("--scoring", "half", "--context", n_ctx, "--bos", bos), costs, None)
