"""mlx-embeddings: encoders with padded batches. ModernBERT's masks are additive. Masks with a window are int32."""

import mlx.core as mx
from arm import main
from mlx.utils import tree_map
from mlx_embeddings.models import bert, modernbert, qwen3

SIZES = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
LENGTHS = (48, 20, 5)


def embed(module, dtype=mx.float32, **config):
    """The model's vectors for three texts of different lengths in one batch, without the padding."""
    model = module.Model(module.ModelArgs(**SIZES, **config))
    model.update(tree_map(lambda x: x.astype(dtype), model.parameters()))
    model.eval()
    tokens = mx.random.randint(0, 200, (3, 48))
    mask = mx.array([[1] * length + [0] * (48 - length) for length in LENGTHS])

    def run():
        outputs = model(tokens, attention_mask=mask)
        texts = [outputs.last_hidden_state[row, :length] for row, length in enumerate(LENGTHS)]
        return [outputs.text_embeds, texts]

    return run


MODERNBERT = {
    "model_type": "modernbert",
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "global_attn_every_n_layers": 3,
    "local_attention": 16,
    "architectures": ["ModernBertModel"],
}


def modernbert_in_float32():
    """Some layers have a window of 16 tokens."""
    return embed(modernbert, **MODERNBERT)


def modernbert_in_float16():
    return embed(modernbert, mx.float16, **MODERNBERT)


def qwen3_embedding():
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    return embed(qwen3, model_type="qwen3", num_hidden_layers=2, max_position_embeddings=128, **heads)


def bert_writes_attention_out():
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    more = {"type_vocab_size": 2, "layer_norm_eps": 1e-12}
    return embed(bert, model_type="bert", num_hidden_layers=2, max_position_embeddings=128, **dropout, **more)


if __name__ == "__main__":
    main(modernbert_in_float32, modernbert_in_float16, qwen3_embedding, bert_writes_attention_out)
