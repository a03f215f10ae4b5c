"""Loads a model as mlx-lm does, from a folder, the hub or this package, and turns text into its tokens."""

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from flash_evals import hub
from flash_evals.errors import EvalError, first_line

Bos = Literal["auto", "always", "never"]
DEMO_MODEL = Path(__file__).parent / "demo_model"


@dataclass(frozen=True)
class LoadedModel:
    model: Any  # an mlx.nn.Module
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    config: dict[str, Any]
    name: str  # as printed
    source: str  # the folder or hub id that was asked for
    revision: str | None  # the hub's commit

    @property
    def parameters(self) -> int:
        """Number of parameters; a quantised weight counts as many as it stands for."""
        from mlx_lm.utils import get_total_parameters

        return int(get_total_parameters(self.model))  # type: ignore[no-untyped-call]

    @property
    def dtype(self) -> str:
        """The type most of the floating-point parameters have, and the bits of quantised weights."""
        sizes: Counter[str] = Counter()
        parameters: list[tuple[str, mx.array]] = tree_flatten(self.model.parameters())  # type: ignore[assignment]
        for _, parameter in parameters:
            if mx.issubdtype(parameter.dtype, mx.floating):
                sizes[str(parameter.dtype).removeprefix("mlx.core.")] += parameter.size
        [(dtype, _)] = sizes.most_common(1)
        quantization = self.config.get("quantization")
        return f"{quantization['bits']}-bit, {dtype}" if quantization else dtype

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model was made for, in tokens; None if its config does not say."""
        found: int | None = self._setting("max_position_embeddings")
        return found

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model has an embedding for."""
        return int(self._setting("vocab_size"))

    @property
    def heads(self) -> int:
        """Query heads of a layer. Raises EvalError if the config does not say."""
        for name in ("num_attention_heads", "n_heads", "n_head", "num_heads"):
            if heads := self._setting(name):
                return int(heads)
        raise EvalError(f"the config.json of {self.name} does not say how many heads it has (num_attention_heads)")

    def _setting(self, name: str) -> Any:
        """From config.json; models that see or hear keep the language model's in a part of it."""
        return self.config.get(name, self.config.get("text_config", {}).get(name))

    def require_positions(self, tokens: int, what: str) -> None:
        """EvalError if a sequence of that many tokens is longer than the model allows."""
        if self.max_positions is not None and tokens > self.max_positions:
            raise EvalError(
                f"{what} needs {tokens:,} positions, {self.name} has {self.max_positions:,} (max_position_embeddings)"
            )

    def describe(self) -> dict[str, Any]:
        """For the result files."""
        return {
            "name": self.name,
            "source": self.source,
            "revision": self.revision,
            "type": self.config["model_type"],
            "parameters": self.parameters,
            "dtype": self.dtype,
            "max_positions": self.max_positions,
        }


@dataclass(frozen=True)
class Tokens:
    """A text as the model reads it: `ids[k]` is a token, `ends[k]` the number of characters up to its end."""

    text: str
    ids: np.ndarray
    ends: np.ndarray
    bos: Literal["bos", "eos"] | None  # the token put in front of the text

    def text_up_to(self, token: int) -> str:
        """The text from its start to the end of that token; all of it for the last one."""
        return self.text if token == len(self.ids) - 1 else self.text[: self.ends[token]]


def load(model: str | None) -> LoadedModel:
    """A model and its tokenizer. None is the model in this package.

    Raises EvalError: no such folder, nothing to load in it, broken files, a type that mlx-lm does not have,
    no network.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is for other users than ours
    if model is None:
        folder, name, revision = DEMO_MODEL, "Qwen2 demo", None
    elif Path(model).exists():
        folder, revision = Path(model), None
        name = folder.resolve().name
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise EvalError(f"no such model folder: {model}")
    else:
        folder = _from_hub(model)
        name, revision = model.split("/")[-1], folder.name

    for pattern in ("config.json", "model*.safetensors"):
        if not any(folder.glob(pattern)):
            raise EvalError(f"{folder} is not a model folder in mlx-lm's layout: it has no {pattern}")

    from mlx_lm import load as mlx_lm_load

    try:
        network, tokenizer, config = mlx_lm_load(str(folder), return_config=True)  # type: ignore[misc]
    except Exception as error:
        # Anything can be wrong with files from elsewhere, and several libraries take part in reading them.
        raise EvalError(f"cannot load the model in {folder}: {first_line(error)}") from error
    if not tokenizer.encode("a", add_special_tokens=False):
        raise EvalError(f"cannot load the model in {folder}: it has no tokenizer")
    return LoadedModel(network, tokenizer, config, name, model or "demo", revision)


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    hub.quiet()
    online = hub.revision(repo, "model") is not None
    try:
        return Path(snapshot_download(repo, allow_patterns=DEFAULT_ALLOW_PATTERNS, local_files_only=not online))
    except LocalEntryNotFoundError as error:
        raise hub.nothing_cached(f"model {repo}", "--model FOLDER") from error
    except Exception as error:
        raise EvalError(f"cannot download model {repo}: {first_line(error)}") from error


def encode(loaded: LoadedModel, text: str, bos: Bos = "auto") -> Tokens:
    """The text as one stream of tokens, behind a BOS: "auto" if the model's tokenizer puts one there itself, "always",
    "never".

    Always is what lm-evaluation-harness does: EOS stands in where the tokenizer has no BOS. Raises EvalError if it has
    neither, if it cannot say which characters a token stands for, and for tokens that the model does not have.
    """
    # mlx-lm's wrapper forwards attributes, but cannot be called.
    tokenizer = loaded.tokenizer._tokenizer
    if not tokenizer.is_fast:
        raise EvalError(f"the tokenizer of {loaded.name} cannot say which characters a token stands for")
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
    # MLX reads whatever lies behind the embedding, and says nothing.
    if ids and max(ids) >= loaded.vocabulary:
        raise EvalError(
            f"the tokenizer of {loaded.name} makes token {max(ids)}, the model has {loaded.vocabulary} (vocab_size)"
        )
    return Tokens(text, np.array(ids, dtype=np.int32), np.array(ends, dtype=np.int64), prefix)
