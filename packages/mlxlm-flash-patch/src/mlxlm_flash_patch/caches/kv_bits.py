"""What enable(kv_bits=...) asks for, and the replacement of the function that makes a model's caches.

mlx-lm is imported only when there is something to quantise.
"""

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashattn_core.argument_types import integer

TEXT = "c96cb169fd5e0ec4"  # the hash of mlx_lm/models/cache.py in mlx-lm 0.32.0 to 0.32.2


@dataclass(frozen=True)
class KVBits:
    """How new caches store keys and values: in so many bits, with a scale and a bias for each group of elements."""

    bits: int
    group_size: int = 64
    start: int = 0  # tokens that a cache holds in 16 bits

    def __post_init__(self) -> None:
        for name, given, known in (("kv_bits", self.bits, (4, 8)), ("kv_group_size", self.group_size, (32, 64, 128))):
            if integer(given) not in known:
                raise ValueError(f"[enable] {name} is {given!r}, expected one of {', '.join(map(str, known))}")
        start = integer(self.start)
        if start is None or start < 0:
            raise ValueError(f"[enable] quantized_kv_start is {self.start!r}, expected a whole number, at least 0")


current: KVBits | None = None  # what new caches get; None: they hold 16 bits


def quantised_caches(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Replaces the function that makes a model's caches. After enable(kv_bits=...) they are quantised."""

    @functools.wraps(original)
    def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
        caches = original(model, max_kv_size)
        if current is None:
            return caches
        from .making import quantise

        return quantise(model, caches, current)

    return make_prompt_cache


def require_tested() -> None:
    """Raises RuntimeError if mlx-lm's caches are not those of a tested release."""
    from mlx_lm.models import cache

    with contextlib.suppress(OSError):  # without its source
        if hashlib.sha256(inspect.getsource(cache).encode()).hexdigest()[:16] == TEXT:
            return
    why = "the source of mlx_lm.models.cache is another, or is missing"
    raise RuntimeError(f"[enable] kv_bits expects the caches of mlx-lm 0.32.0 to 0.32.2: {why}")
