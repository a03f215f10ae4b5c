"""The classes of quantised caches. Each is a subclass of the mlx-lm class that stores the same tokens in 16 bits."""

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm

from ..router import appended
from . import held

Rows = tuple[mx.array, mx.array, mx.array]  # weights, scales and biases, as mx.quantize() returns them


def _in_each_part(name: str) -> Callable[..., None]:
    def method(self: Any, *arguments: Any) -> None:
        parts = self.parts()
        for part in parts:
            getattr(part, name)(*arguments)
        self.take(parts)

    return method


class Quantized:
    """Makes a subclass of an mlx-lm cache store quantised keys and values.

    mlx-lm's classes move rows of one array of keys and one of values. A quantised row is in three arrays: weights,
    scales and biases. So a method that touches rows runs mlx-lm's own method once for each of these arrays, in
    parts(). Nothing is quantised but new keys and values, and nothing is dequantised. The other methods, such as those
    that count tokens or make masks, are mlx-lm's own.
    """

    own: ClassVar[Any]  # mlx-lm's class
    keys: Any  # None, or Rows
    values: Any

    def __init__(self, *arguments: Any, group_size: int = 64, bits: int = 8, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group_size, self.bits = group_size, bits

    def parts(self) -> list[Any]:
        """Three of mlx-lm's caches. The first holds the weights of keys and values, the next scales, then biases."""
        parts = []
        for i in range(3):
            part = self.own.__new__(self.own)
            # mlx-lm changes arrays such as left_padding in place. astype() gives each part an array object of its own.
            vars(part).update((k, v.astype(v.dtype) if isinstance(v, mx.array) else v) for k, v in vars(self).items())
            if self.keys is not None:
                part.keys, part.values = self.keys[i], self.values[i]
            parts.append(part)
        return parts

    def take(self, parts: Sequence[Any]) -> None:
        """Puts parts together again."""
        vars(self).update(vars(parts[0]))
        if parts[0].keys is not None:
            self.keys, self.values = zip(*((part.keys, part.values) for part in parts), strict=True)
        held.note(self)

    @classmethod
    def of(cls, parts: Sequence[Any], like: Any) -> Any:
        """A cache made of parts, with the bits and the group size of another."""
        made = cls.__new__(cls)
        made.group_size, made.bits = like.group_size, like.bits
        made.take(parts)
        return made

    def to_quantized(self, **_: Any) -> Any:
        """The cache itself, so that mlx-lm's --kv-bits quantises nothing again."""
        return self

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        new = [mx.quantize(x, group_size=self.group_size, bits=self.bits) for x in (keys, values)]
        parts = self.parts()
        read = [part.update_and_fetch(*rows) for part, *rows in zip(parts, *new, strict=True)]
        self.take(parts)
        return tuple(zip(*read, strict=True))  # type: ignore[return-value]

    def keys_and_values(self) -> tuple[Rows, Rows]:
        return tuple(zip(*(part.keys_and_values() for part in self.parts()), strict=True))  # type: ignore[return-value]

    @property
    def state(self) -> Any:
        return (*self.own.state.fget(self), self.group_size, self.bits)

    @state.setter
    def state(self, state: Any) -> None:
        *own, self.group_size, self.bits = state
        self.own.state.fset(self, own)

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else sum(x.nbytes for x in (*self.keys, *self.values))


class _Single(Quantized):
    """The cache of one sequence."""

    batch: ClassVar[Any]  # the class that several of these are merged into

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        caches = [copy.copy(cache).to_quantized() for cache in caches]  # copied, because merge() must not change them
        parts = zip(*(cache.parts() for cache in caches), strict=True)
        return cls.batch.of([cls.batch.own.merge(part) for part in parts], like=caches[0])


class _Batch(Quantized):
    """The cache of several sequences."""

    single: ClassVar[Any]  # the class that one sequence is extracted into
    finalize, filter = map(_in_each_part, ("finalize", "filter"))

    def extend(self, other: Any) -> None:
        parts = self.parts()
        for part, others in zip(parts, other.to_quantized().parts(), strict=True):
            part.extend(others)
        self.take(parts)

    def extract(self, idx: int) -> Any:
        return self.single.of([part.extract(idx) for part in self.parts()], like=self)


class QuantizedKVCache(_Single, mlx_lm.QuantizedKVCache):
    """mlx-lm's QuantizedKVCache, which can also be merged into a batch."""

    own = mlx_lm.KVCache
    __init__ = mlx_lm.QuantizedKVCache.__init__
    state = mlx_lm.QuantizedKVCache.state
    keys_and_values = mlx_lm.QuantizedKVCache.keys_and_values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        read: tuple[Rows, Rows] = mlx_lm.QuantizedKVCache.update_and_fetch(self, keys, values)  # type: ignore[no-untyped-call]
        held.note(self)
        return read

    def size(self) -> int:
        return self.offset


class QuantizedRotatingKVCache(_Single, mlx_lm.RotatingKVCache):  # type: ignore[misc]
    own = mlx_lm.RotatingKVCache


class QuantizedChunkedKVCache(Quantized, mlx_lm.ChunkedKVCache):
    own = mlx_lm.ChunkedKVCache
    maybe_trim_front = _in_each_part("maybe_trim_front")


class BatchQuantizedKVCache(_Batch, mlx_lm.BatchKVCache):
    own, single = mlx_lm.BatchKVCache, QuantizedKVCache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        read = appended(self, keys, values, self._idx)
        if read is None:
            return super().update_and_fetch(keys, values)
        self.offset = self.offset + keys.shape[2]
        self._idx += keys.shape[2]
        held.note(self)
        return read


class BatchQuantizedRotatingKVCache(_Batch, mlx_lm.BatchRotatingKVCache):  # type: ignore[misc]
    own, single = mlx_lm.BatchRotatingKVCache, QuantizedRotatingKVCache


class _Latent:
    """Gives the model dequantised arrays, for models whose cache holds a latent vector and the keys' rotated part.

    Such a model computes a part of its scores itself, and in a prompt also keys and values. MLX computes a dequantised
    array only if the model does so. In a decode step the latent vectors are both key and value, and attention reads the
    quantised rows.
    """

    _latents: weakref.ref[mx.array] | None = None  # weak, because the array's graph would keep MLX from reusing memory

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        stored = super().update_and_fetch(keys, values)  # type: ignore[misc]
        how: Any = {"group_size": self.group_size, "bits": self.bits}
        latents, rotated = (mx.dequantize(*rows, **how) for rows in stored)
        self._latents = weakref.ref(latents)
        return latents, rotated

    def rows_of(self: Any, key: mx.array, value: mx.array) -> Rows | None:
        """The quantised rows of the latent vectors, if key and value are what update_and_fetch() has returned."""
        is_latent = key is value and self._latents is not None and key is self._latents()
        return self.keys_and_values()[0] if is_latent else None


class QuantizedLatentKVCache(_Latent, QuantizedKVCache):  # type: ignore[misc]
    pass


class BatchQuantizedLatentKVCache(_Latent, BatchQuantizedKVCache):  # type: ignore[misc]
    single = QuantizedLatentKVCache


QuantizedKVCache.batch, QuantizedRotatingKVCache.batch = BatchQuantizedKVCache, BatchQuantizedRotatingKVCache
QuantizedLatentKVCache.batch = BatchQuantizedLatentKVCache
CLASSES = (QuantizedKVCache, QuantizedRotatingKVCache, QuantizedChunkedKVCache)  # for caches that models make
BATCHES = (BatchQuantizedKVCache, BatchQuantizedRotatingKVCache, BatchQuantizedLatentKVCache)
for _cls in (*CLASSES[1:], *BATCHES, QuantizedLatentKVCache):
    setattr(mlx_lm, _cls.__name__, _cls)  # load_prompt_cache() finds a file's classes here
