"""Writes a model of a published shape, with random weights and the tokenizer of flash_evals' demo model.

Such a model can be made without the hub. It serves to measure speed, memory, and how far two implementations differ.

    uv run packages/evals/scripts/write_random_model.py gpt-oss-20b FOLDER --dtype bfloat16 num_hidden_layers=4
    uv run flash-eval speed --model FOLDER

An argument SETTING=NUMBER replaces one of the shape's settings.
"""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from flash_evals.work.models import DEMO_MODEL
from mlx.utils import tree_flatten

# Model -> its shape, as in its config.json on the hub.
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 32_768,
        "vocab_size": 262_144,
        "tie_word_embeddings": True,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "max_position_embeddings": 131_072,
        "vocab_size": 201_088,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131_072,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("settings", metavar="[SETTING=NUMBER]...", nargs=-1)
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="bfloat16", show_default=True)
def main(shape: str, folder: Path, settings: tuple[str, ...], dtype: str) -> None:
    config = SHAPES[shape] | dict(_setting(text, SHAPES[shape]) for text in settings)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(config, getattr(mx, dtype)))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for tokenizer in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(tokenizer, folder)


def _setting(text: str, shape: dict[str, Any]) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name not in shape or not number.isdecimal():
        raise click.UsageError(f"{text!r} is no SETTING=NUMBER; the settings are {', '.join(shape)}")
    return name, int(number)


def parameters(config: dict[str, Any]) -> dict[str, mx.array]:
    """Returns the model's initial parameters, by name. The arrays are not evaluated."""
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    drawn = dict(tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters()))
    if config["tie_word_embeddings"]:
        drawn.pop("lm_head.weight", None)
    return drawn


def _weights(config: dict[str, Any], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Returns the initial parameters, with two changes. Matrices are doubled, so that attention matters to the logits.
    Arrays of zeros, such as sinks, get random numbers instead.
    """
    mx.random.seed(0)
    weights = parameters(config)
    for name, drawn in weights.items():
        weight = 2 * drawn if drawn.ndim > 1 else drawn
        weights[name] = (weight if mx.any(drawn) else mx.random.normal(drawn.shape)).astype(dtype)
        mx.eval(weights[name])  # one by one, because memory cannot hold all in float32
    return weights


if __name__ == "__main__":
    main()
