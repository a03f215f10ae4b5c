"""Runs models of any version of mlx-lm, with plain and quantised caches.

Each model reads a prompt, then four tokens one by one.
"""

import importlib

import mlx.core as mx
from arm import main
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

SIZES = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rope_scaling": None}


def logits(model_type, quantised=False, **config):
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": model_type, **SIZES, **config}))
    model.eval()
    prompt = mx.random.randint(0, 200, (2, 40))

    def run():
        cache = make_prompt_cache(model)
        if quantised:
            cache = [QuantizedKVCache(group_size=32, bits=8) for _ in cache]
        outputs = [model(prompt, cache=cache)]
        return outputs + [model(mx.array([[token], [token + 1]]), cache=cache) for token in range(20, 24)]

    return run


def llama():
    return logits("llama")


def gemma2():
    """Gemma 2 has a soft-cap, so it uses matrix products and softmax in place of MLX's attention."""
    return logits("gemma2", query_pre_attn_scalar=32, attn_logit_softcapping=2.0, final_logit_softcapping=30.0)


def gpt_oss():
    """gpt-oss has sinks, and layers with a window of 16 tokens."""
    return logits("gpt_oss", **SINKS)


def llama_with_a_quantised_cache():
    return logits("llama", quantised=True)


if __name__ == "__main__":
    main(llama, gemma2, gpt_oss, llama_with_a_quantised_cache)
