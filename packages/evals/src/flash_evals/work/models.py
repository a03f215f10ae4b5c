"""Loads a model with mlx-lm, from a folder, the hub or this package. Encodes text with the model's tokenizer."""

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from flash_evals.results.errors import EvalError, failing
from flash_evals.results.provenance import Model
from flash_evals.work import hub

Bos = Literal["auto", "always", "never"]
DEMO_MODEL = Path(__file__).parent / "demo_model"
ADAPTER_PARAMETERS = {"lora_a", "lora_b", "m"}  # mlx-lm's names of adapter parameters; m is DoRA's magnitude


@dataclass(frozen=True)
class LoadedModel:
    model: Any  # an mlx.nn.Module
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    config: dict[str, Any]
    described: Model

    @property
    def name(self) -> str:
        return self.described.name

    @property
    def vocabulary(self) -> int:
        """The number of token ids that have an embedding."""
        return int(_setting(self.config, "vocab_size"))

    @property
    def heads(self) -> int:
        """The number of query heads in a layer. Raises EvalError if the config does not have it."""
        for name in ("num_attention_heads", "n_heads", "n_head", "num_heads"):
            if heads := _setting(self.config, name):
                return int(heads)
        raise EvalError(f"the config.json of {self.name} lacks the number of attention heads (num_attention_heads)")

    @property
    def head_dim(self) -> int:
        """The size of a query head: the config's head_dim if it has one, else hidden_size / heads."""
        return int(_setting(self.config, "head_dim") or _setting(self.config, "hidden_size") // self.heads)

    def require_positions(self, tokens: int, what: str) -> None:
        """Raises EvalError if a sequence of that many tokens is longer than the model allows."""
        most = self.described.max_positions
        if most is not None and tokens > most:
            has = f"{self.name} has {most:,} (max_position_embeddings)"
            raise EvalError(f"{what} needs {tokens:,} positions, but {has}")


@dataclass(frozen=True)
class Tokens:
    """A text as tokens. `ids[k]` is a token, and `ends[k]` counts the text's characters up to that token's end."""

    text: str
    ids: np.ndarray
    ends: np.ndarray
    bos: Literal["bos", "eos"] | None  # which token stands in front of the text, if any

    def text_up_to(self, token: int) -> str:
        """The text from its start to the end of that token. For the last token, this is the whole text."""
        return self.text if token == len(self.ids) - 1 else self.text[: self.ends[token]]


def _setting(config: dict[str, Any], name: str) -> Any:
    """Returns a setting of config.json. In vision and audio models, text_config has the language model's settings."""
    return config.get(name, config.get("text_config", {}).get(name))


def parameters(network: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(network.parameters()))


def load(model: str | None, revision: str | None = None, adapter_path: str | None = None) -> LoadedModel:
    """Loads a model and its tokenizer, and adapters if `adapter_path` is given. model None: this package's demo model.

    `revision`: branch, tag or commit of a model on the hub. None means "main". Raises EvalError if loading fails.
    """
    from huggingface_hub import snapshot_download
    from mlx_lm import load as mlx_lm_load
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS as FILES
    from mlx_lm.utils import get_total_parameters

    logging.getLogger("transformers").setLevel(logging.ERROR)  # hides warnings, which are for developers
    path, commit = DEMO_MODEL if model is None else Path(model), None
    name = "Qwen2 demo" if model is None else path.resolve().name
    if model is not None and not path.exists():
        with hub.reading(model, "model", revision) as (commit, online):
            path = Path(snapshot_download(model, revision=revision, allow_patterns=FILES, local_files_only=not online))
    elif revision is not None:
        raise EvalError(f"--revision has no meaning for {f'the folder {model}' if model else 'the built-in model'}")
    # Catches any exception, because files may be broken in any way and several libraries read them.
    with failing(f"cannot load the model in {path}", (Exception,)):
        network, tokenizer, config = mlx_lm_load(str(path), return_config=True)  # type: ignore[misc]
    if not tokenizer.encode("a", add_special_tokens=False):
        raise EvalError(f"cannot load the model in {path}: the folder has no tokenizer")
    adapter_type = _add_adapters(network, adapter_path) if adapter_path is not None else None
    described = Model(
        name=name,
        source=model or "demo",
        revision=commit,
        adapter_path=adapter_path,
        adapter_type=adapter_type,
        type=config["model_type"],
        parameters=get_total_parameters(network),  # type: ignore[no-untyped-call]
        dtype=_dtype(network, config),
        max_positions=_setting(config, "max_position_embeddings"),
    )
    return LoadedModel(network, tokenizer, config, described)


def _dtype(network: Any, config: dict[str, Any]) -> str:
    """Names the most common floating-point dtype: `float16`, or `4-bit, float16` in a quantised model."""
    sizes: Counter[str] = Counter()
    for parameter in parameters(network).values():
        if mx.issubdtype(parameter.dtype, mx.floating):
            sizes[str(parameter.dtype).removeprefix("mlx.core.")] += parameter.size
    [(dtype, _)] = sizes.most_common(1)
    quantization = config.get("quantization")
    return f"{quantization['bits']}-bit, {dtype}" if quantization else dtype


def _add_adapters(network: Any, adapter_path: str) -> str:
    """Loads adapters as mlx-lm does, and returns their type. Raises EvalError if the file lacks tensors of adapters."""
    from mlx_lm.utils import load_adapters

    folder, what = Path(adapter_path), f"cannot load the adapters in {adapter_path}"
    with failing(what, (Exception,)):
        load_adapters(network, adapter_path)
        kind = json.loads((folder / "adapter_config.json").read_bytes()).get("fine_tune_type", "lora")
        given = set(mx.load(str(folder / "adapters.safetensors")))
    needed = {name for name in parameters(network) if name.split(".")[-1] in ADAPTER_PARAMETERS}
    if not given:
        raise EvalError(f"{what}: adapters.safetensors holds no adapters")
    if not needed <= given:
        raise EvalError(f"{what}: the file lacks {len(needed - given)} of {len(needed)} tensors, and has {len(given)}")
    network.eval()  # no dropout
    return str(kind)


def encode(loaded: LoadedModel, text: str, bos: Bos) -> Tokens:
    """Encodes a text. With bos "auto", a BOS comes first if the tokenizer by default adds a BOS.

    With "always", a BOS comes first or, if the tokenizer has none, an EOS, as in lm-evaluation-harness. If the
    tokenizer then has neither, raises EvalError. Also raises EvalError if the tokenizer cannot say which characters a
    token stands for, or makes a token without an embedding.
    """
    # Takes the tokenizer out of mlx-lm's wrapper, because the wrapper cannot be called.
    tokenizer = loaded.tokenizer._tokenizer
    with failing(f"the tokenizer of {loaded.name} cannot tell which characters a token stands for"):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, ends = encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]
    set_by_itself = tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    prefix: Literal["bos", "eos"] | None = None
    if bos == "always" or (bos == "auto" and set_by_itself):
        prefix = "eos" if tokenizer.bos_token_id is None else "bos"
        first = tokenizer.eos_token_id if prefix == "eos" else tokenizer.bos_token_id
        if first is None:
            raise EvalError(f"--bos always: the tokenizer of {loaded.name} has neither a BOS nor an EOS")
        ids, ends = [first, *ids], [0, *ends]
    # For a token beyond the vocabulary, MLX would read past the end of the embedding table and raise no error.
    if ids and max(ids) >= loaded.vocabulary:
        size = f"the vocab_size of {loaded.name} is {loaded.vocabulary}"
        raise EvalError(f"the tokenizer makes token {max(ids)}, but {size}")
    return Tokens(text, np.array(ids, dtype=np.int32), np.array(ends, dtype=np.int64), prefix)
