"""Which attention calls a model makes, found by building it without weights and letting it read a prompt."""

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from flashattn_core import _ext

from .patch import enabled, status
from .router import FlashFallbackWarning, observed


def attention_of(name: str) -> tuple[list[_ext.Call], int, dict[str, int]]:
    """Builds a model and lets it read a prompt.

    Returns the calls that flash attention covers, how many of them are left to MLX's own attention because it is
    estimated to be faster, and the fallbacks: reason -> number.

    The model needs no weights, because its outputs are not evaluated. Only the checks of kernels evaluate attention.

    Args:
      name: a folder in mlx-lm's layout, or a hub id whose configuration is in the local hub cache.

    Raises:
      ValueError, OSError: there is no such configuration, or mlx-lm cannot build or call the model.
      PermissionError: (an OSError) the model has its own code, which this function does not run.
    """
    from mlx_lm.utils import load_model

    file = _configuration(name)
    if own := json.loads(file.read_text(encoding="utf-8")).get("model_file"):
        raise PermissionError(f"{name} brings its own code, {own}, which mlxlm-flash does not run")
    try:
        model, config = load_model(file.parent, lazy=True, strict=False)
    except (ImportError, OSError):
        raise
    except Exception as error:  # of mlx-lm, which does not check a configuration
        raise ValueError(f"mlx-lm cannot build a model from {name}: {_in_one_line(error)}") from error
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    model.set_dtype(getattr(mx, dtype, mx.bfloat16))
    seen: list[_ext.Call] = []
    with enabled(), observed(lambda arguments: seen.append(arguments.call)), warnings.catch_warnings():
        warnings.simplefilter("ignore", FlashFallbackWarning)  # this function returns the reasons
        before = status()
        try:
            model(mx.zeros((1, 1 + _longest_window(config)), mx.int32))
        except Exception as error:  # of the model's own code
            raise ValueError(f"a model built from {name} cannot read a prompt: {_in_one_line(error)}") from error
        now = status()
        left = sum(now.left.values()) - sum(before.left.values())
        return seen, left, dict(Counter(now.fallbacks) - Counter(before.fallbacks))


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _configuration(model: str) -> Path:
    """The path of config.json, in a folder or in the local hub cache, without network. Raises ValueError or OSError."""
    if Path(model).is_dir():
        return Path(model, "config.json")
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")  # raises ValueError for an invalid id
    if not isinstance(found, str):
        raise ValueError(f"{model} is not a folder, and the local hub cache does not hold its config.json")
    return Path(found)


def _longest_window(config: dict[str, Any]) -> int:
    """The largest window, in tokens, in a configuration and those nested in it; 1 if there is none."""
    sizes = [_longest_window(value) for value in config.values() if isinstance(value, dict)]
    sizes += [value for name, value in config.items() if "window" in name and isinstance(value, int)]
    return max(sizes, default=1)
