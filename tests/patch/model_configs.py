"""Small models of every model type of mlx-lm: their configurations, and random weights."""

import importlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

# The model types that most tests use. With these configurations, Llama has a window. Qwen3 normalises queries and keys.
# Gemma 3 has a window and also normalises queries and keys. gpt-oss has sinks.
ARCHITECTURES = ("qwen2", "llama", "qwen3", "gemma3_text", "gpt_oss")
LAYERS = 2

# Each key lists the names of one configuration field in different model types. All of these names get the value. Model
# types ignore names that they do not know.
NAMES = {
    "vocab_size num_vocab vocab_size_per_layer_input": 97,
    "hidden_size n_embd d_model model_dim hidden_dim dim_model_base block_dim moe_hidden_size": 64,
    "intermediate_size intermediate_size_mlp dense_intermediate_size ff_intermediate_size ffn_hidden_size n_inner": 48,
    "num_hidden_layers num_layers n_layer n_layers num_transformer_layers": LAYERS,
    "num_attention_heads num_heads n_head n_heads swa_num_attention_heads": 4,
    "num_key_value_heads num_kv_heads n_kv_heads n_shared_head num_attention_groups swa_num_key_value_heads": 2,
    "head_dim hidden_size_per_head kv_channels swa_head_dim query_pre_attn_scalar": 16,
    "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon post_norm_eps": 1e-6,
    "max_position_embeddings model_max_length n_positions n_ctx block_size": 512,
    "rope_theta rotary_emb_base": 10000.0,
    "rope_local_base_freq swa_rope_theta": 1000.0,
    "rope_scaling": None,
    "partial_rotary_factor rotary_pct": 0.5,
    "rotary_dim": 8,
    "attention_bias mlp_bias use_bias use_qkv_bias conv_bias": False,
    "use_qk_norm qk_norm tie_word_embeddings": True,
    "post_norm": False,
    "hidden_act": "silu",
    "attention_multiplier": 0.25,
    "embedding_multiplier residual_multiplier lm_head_multiplier output_multiplier logits_scaling scale_emb": 1.0,
    "scale_depth": 1.4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping logits_soft_cap": 30.0,
    # layers that share keys and values, or that run several times
    "num_kv_shared_layers": 0,
    "num_kv_reuse_layers": 1,
    "cla_share_factor": 2,
    "use_cla": True,
    "loop_window_size": 8,
    # mixtures of experts
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size": 32,
    "routed_expert_hidden_size share_expert_dim": 32,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok num_experts_per_token moe_topk moe_top_k zero_expert_num interleave_moe_layer_step": 2,
    "n_shared_experts num_shared_experts num_shared_expert": 1,
    "n_group topk_group": 1,
    "norm_topk_prob use_expert_bias use_mixed_mlp_moe": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "zero_expert_type": "identity",
    "moe_layer_freq first_k_dense_replace decoder_sparse_step num_dense_layers": 1,
    "mlp_only_layers": [],
    # latent attention
    "attention_method": "MLA",
    "kv_lora_rank q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "mla_scale_q_lora mla_scale_kv_lora": True,
    "index_head_dim": 32,
    "index_n_heads index_topk_blocks": 2,
    "index_topk index_block_size": 8,
    # sliding windows
    "sliding_window sliding_window_size attention_chunk_size": 8,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    # linear attention in every second layer, convolutions, Mamba
    "layer_group_size full_attention_interval attn_layer_period expert_layer_period": 2,
    "attn_layer_offset expert_layer_offset": 1,
    "linear_num_value_heads linear_num_key_heads": 2,
    "linear_key_head_dim linear_value_head_dim": 32,
    "linear_conv_kernel_dim conv_L_cache conv1d_width mamba_d_conv conv_kernel": 3,
    "conv_window": 2,
    "mamba_d_ssm": 64,
    "mamba_d_state mamba_d_head mamba_head_dim ssm_state_size": 16,
    "mamba_n_heads mamba_num_heads": 4,
    "mamba_expand n_groups": 2,
    "group_norm_size mamba_n_groups": 1,
    "use_conv_bias": True,
}
COMMON = {name: value for names, value in NAMES.items() for name in names.split()}

ROPES = {"full_attention": {"rope_theta": 10000.0}, "sliding_attention": {"rope_theta": 1000.0}}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
}
KDA = {"num_heads": 4, "head_dim": 16, "kda_layers": [1], "full_attn_layers": [2], "short_conv_kernel_size": 3}

# Model type -> fields that only this type has, or that have another value for this type.
OWN = {
    "baichuan_m1": {"sliding_window_layers": [0], "tie_word_embeddings": False},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "deepseek_v41": {
        "head_dim": 32,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "scoring_func": "sqrtsoftplus",
        "compress_ratios": [1, 4],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1],
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "gemma3n": {
        "activation_sparsity_pattern": [0.5, 0.0],
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 1.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "rope_parameters": {**ROPES, "full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    },
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_d_head": 32},
    "hunyuan": {"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "kimi_k3": {
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 1,
        "linear_attn_config": {**KDA, "gate_lower_bound": -5.0},
    },
    "kimi_linear": {"linear_attn_config": KDA},
    "laguna": {"rope_parameters": {name: {**rope, "rope_type": "default"} for name, rope in ROPES.items()}},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 4,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"num_experts_per_tok": 1, "num_hidden_layers": 4},  # only every fourth layer attends to all keys
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash_ngram": {"ngram_vocab_size_ratio": 3},
    "mellum": {"rope_parameters": ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "v_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 128}},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1],
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_head_dim": 16,
    },
    "ministral3": {"rope_parameters": YARN},
    "mistral4": {"rope_parameters": YARN},
    "muse_spark": {
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0],
        "num_shared_experts": 0,
    },
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * LAYERS},
    "nemotron_h": {"mamba_proj_bias": False, "time_step_limit": [0.0, 2.0], "hybrid_override_pattern": ["M", "*"]},
    "olmo_hybrid": {
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
    },
    "openelm": {"ffn_dim_divisor": 8, "num_query_heads": [4, 4], "num_kv_heads": [2, 2], "ffn_multipliers": [1.0, 1.0]},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
    },
    "qwen3_5": {"num_experts": 0, "intermediate_size": 128},
    "recurrent_gemma": {"attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "smollm3": {"no_rope_layer_interval": 2},
    "spark2_5": {"rope_parameters": ROPES, "hidden_act": "gelu"},
}

# Maps model types that contain a language model to the type of that language model.
INSIDE = {
    **{
        name: name for name in ("gemma3n", "kimi_k3", "llama4", "minimax_m3_vl", "muse_spark", "qwen3_5", "qwen3_5_moe")
    },
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


def config(model_type):
    """The configuration of a small model of this type."""
    inside = INSIDE.get(model_type)
    if inside is None:
        return {**COMMON, **OWN.get(model_type, {}), "model_type": model_type}
    text = {**COMMON, **OWN.get(inside, {}), "model_type": inside}
    outside = {} if inside == model_type else OWN.get(model_type, {})
    return {"vocab_size": COMMON["vocab_size"], **outside, "model_type": model_type, "text_config": text}


def prepared(model):
    """Replaces parts of `model` that need a large vocabulary or a GPU. Returns `model`."""
    if hasattr(model, "_dummy_tokenizer_ids"):  # phi3small sets the logits of these tokens to -inf
        model._dummy_tokenizer_ids = mx.array([COMMON["vocab_size"] - 1])
    for module in model.modules():
        for name, child in module.children().items():
            if type(child).__name__ == "BitLinear":  # replaced, because only a Metal kernel computes this layer
                setattr(module, name, nn.Linear(child.in_features, child.out_features, bias=False))
    return model


def random_model(model_type, config, dtype=mx.float32, seed=0):
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = prepared(module.Model(module.ModelArgs.from_dict(config)))

    def weight(initial):
        if not mx.issubdtype(initial.dtype, mx.floating):
            return initial
        if not mx.any(initial):  # tests would not notice if a model ignored a bias of zeros
            initial = mx.random.normal(initial.shape)
        # Doubled, because nn.Linear's initial weights are so small that attention would hardly change the logits.
        return (initial * 2 if initial.ndim > 1 else initial).astype(dtype)

    model.update(tree_map(weight, model.parameters()))
    mx.eval(model)  # also RoPE's _freqs, which is no parameter: another thread could not evaluate it
    return model
