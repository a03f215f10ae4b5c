"""Caches that hold 16 bits until they have as many tokens as quantized_kv_start, and quantised rows from then on."""

import copy
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from . import held
from .kv_bits import KVBits
from .quantized import CLASSES, Quantized

QUANTIZED: dict[Any, Any] = {cls.own: cls for cls in CLASSES}  # mlx-lm's class -> ours


def quantised(cache: Any, kv: KVBits, into: Any) -> Any:
    """Makes a cache of mlx-lm quantise its rows, as one of our classes, in place, and returns it."""
    cache.__class__, cache.kv, cache.into = _waiting(into.own), kv, into
    return cache if kv.start else cache.to_quantized()


class _Waiting:
    """Makes a subclass of an mlx-lm cache. As soon as an object of it has enough tokens, its class becomes `into`.

    A batch quantises all its sequences when the longest has enough tokens, or when one that is quantised joins.
    """

    own: ClassVar[Any]
    kv: KVBits
    into: Any
    keys: Any
    values: Any

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        tokens = self.offset if isinstance(self.offset, int) else getattr(self, "_offset", self._idx)
        if tokens < self.kv.start:
            return self.own.update_and_fetch(self, keys, values)
        # mlx-lm's own --quantized-kv-start, too, quantises between two calls of the model.
        return self.to_quantized().update_and_fetch(keys, values)

    def to_quantized(self: Any, **_: Any) -> Any:
        self.__class__, self.group_size, self.bits = self.into, self.kv.group_size, self.kv.bits
        if self.keys is not None:
            self.keys, self.values = (
                tuple(mx.quantize(x, group_size=self.group_size, bits=self.bits)) for x in (self.keys, self.values)
            )
        held.note(self)
        return self

    def extend(self, other: Any) -> None:
        if isinstance(other, Quantized):
            self.to_quantized().extend(other)
        else:
            self.own.extend(self, other)

    def __reduce__(self: Any) -> Any:  # pickle does not find the class by its name
        return _new, (self.own,), vars(self)

    @classmethod
    def from_state(cls, state: Any) -> Any:
        return cls.own.from_state(state)  # as a cache from a file, which stays as it is

    def extract(self, idx: int) -> Any:
        return quantised(self.own.extract(self, idx), self.kv, self.into.single)


def _new(own: Any) -> Any:
    return object.__new__(_waiting(own))


def _merge(cls: Any, caches: Sequence[Any]) -> Any:
    if any(isinstance(cache, Quantized) for cache in caches):
        return copy.copy(caches[0]).to_quantized().merge(caches)
    return quantised(cls.own.merge(caches), caches[0].kv, caches[0].into.batch)


@functools.cache
def _waiting(own: Any) -> Any:
    """A subclass of mlx-lm's class, with the same name, because a file to which it is saved names the class."""
    merge = {"merge": classmethod(_merge)} if hasattr(own, "merge") else {}
    return type(own.__name__, (_Waiting, own), {"own": own, **merge})
