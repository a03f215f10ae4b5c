"""Makes the KV caches of a model. The patch makes quantised ones; attention reads them with the patch off and on."""

from typing import Any

import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.models.cache import make_prompt_cache

from flash_evals.results.errors import failing
from flash_evals.work.models import LoadedModel
from flash_evals.work.paired import Forward

OPTIONS = ("kv_bits", "kv_group_size", "quantized_kv_start")  # names of settings, and of arguments of flash.enabled()


def make(loaded: LoadedModel, kv_bits: int | None = None, **kv: int) -> list[Any]:
    """Makes empty caches, with OPTIONS. A warning names layers whose caches cannot be quantised."""
    if kv_bits is None:
        return list(make_prompt_cache(loaded.model))
    with failing("--kv-bits"), flash.enabled(kv_bits=kv_bits, **kv):  # type: ignore[arg-type]
        return list(make_prompt_cache(loaded.model))


def reader(loaded: LoadedModel, kv_bits: int | None, **kv: int) -> Forward:
    """Returns a function that reads tokens with new caches of `kv_bits`, or, if it is None, without caches."""
    if kv_bits is None:
        return loaded.model  # type: ignore[no-any-return]
    make(loaded, kv_bits, **kv)  # warns before the work starts

    def read(tokens: mx.array) -> mx.array:
        logits: mx.array = loaded.model(tokens, cache=make(loaded, kv_bits, **kv))
        return logits

    return read
