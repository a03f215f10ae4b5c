"""Decides which of a model's caches are quantised."""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm

from ..router import in_trial, inside, warn
from .kv_bits import KVBits
from .quantized import QuantizedKVCache, QuantizedLatentKVCache
from .waiting import QUANTIZED, quantised

Place = tuple[int, ...]  # of a cache in the list: a layer, and the cache's number if the layer has a CacheList
Into = dict[Place, Any]  # the class of each cache
Kept = dict[Place, str]  # the reasons why caches stay as they are

_plans = dict[int, tuple[weakref.ref[Any], object, Into]]()  # by id of a model


def quantise(model: Any, caches: list[Any], kv: KVBits) -> list[Any]:
    """Makes a model's empty caches quantised ones. Those that cannot be stay as they are, and a warning names them."""
    key, described = id(model), (kv, [type(cache) for cache in caches])
    known = _plans.get(key)
    if known and known[0]() is model and known[1] == described:
        into = known[2]
    else:
        into, kept = _plan(model, caches, kv)
        _plans[key] = weakref.ref(model, lambda _: _plans.pop(key) and None), described, into
        if kept:
            warn(f"kv_bits={kv.bits}: some caches stay as they are: {' · '.join(_grouped(kept))}")
    return _changed(caches, lambda place, cache: quantised(cache, kv, into[place]) if place in into else cache)


def _changed(caches: Iterable[Any], change: Callable[[Place, Any], Any], within: Place = ()) -> list[Any]:
    """Replaces each cache by `change(place, cache)`, also in CacheLists."""

    def changed(place: Place, cache: Any) -> Any:
        if not isinstance(cache, mlx_lm.CacheList):
            return change(place, cache)
        cache.caches = tuple(_changed(cache.caches, change, place))
        return cache

    return [changed((*within, i), cache) for i, cache in enumerate(caches)]


def _plan(model: Any, caches: list[Any], kv: KVBits) -> tuple[Into, Kept]:
    """The classes for the caches that can be quantised, and the reasons why the others cannot."""
    try:
        with inside(in_trial):
            return _tried(model, caches, kv)
    except Exception as error:
        kept: Kept = {}
        why = f"a trial call of the model fails: {_line(error)}"
        _changed(copy.deepcopy(caches), lambda place, _: kept.setdefault(place, why))
        return {}, kept


def _tried(model: Any, caches: list[Any], kv: KVBits) -> tuple[Into, Kept]:
    """Calls the model with quantised caches, because only that shows whether its attention can read them.

    Nothing is evaluated. If the call raises an error, the cache that was used last gets another class or stays as it
    is, and the model is called again. Raises the model's error if no cache is quantised any more.
    """
    into, kept, used, at_once = Into(), Kept(), list[Place](), KVBits(kv.bits, kv.group_size)
    errors: Kept = {}

    def tried(place: Place, cache: Any) -> Any:
        if type(cache) not in QUANTIZED:
            kept[place] = f"{type(cache).__name__} has no quantised form"
        if place in kept:
            return cache
        into.setdefault(place, QUANTIZED[type(cache)])
        return _Tried(quantised(cache, at_once, into[place]), partial(used.append, place), partial(errors.pop, place))

    while True:
        used.clear()
        trial = _changed(copy.deepcopy(caches), tried)
        try:
            for length in (2, 1):
                model(mx.zeros((1, length), mx.int32), cache=trial)
            break
        except Exception as error:
            if not used:
                raise
            last = used[-1]
            if into[last] is QuantizedKVCache:
                into[last], errors[last] = QuantizedLatentKVCache, _why(error)
            else:
                kept[last] = errors.pop(last, _why(error))
    kept |= errors  # the model computes with the arrays, and attention does not read the rows
    return {place: cls for place, cls in into.items() if place not in kept}, kept


class _Tried:
    """A cache that tells when the model uses it, and when attention reads the rows of latent vectors."""

    def __init__(self, cache: Any, use: Callable[[], object], read: Callable[[None], object]) -> None:
        self._cache, self._use, self._read = cache, use, read

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        if name in ("update_and_fetch", "keys_and_values"):
            self._use()
        if name != "rows_of":
            return found

        def rows_of(key: mx.array, value: mx.array) -> Any:
            rows = found(key, value)
            if rows is not None:
                self._read(None)
            return rows

        return rows_of


def _why(error: Exception) -> str:
    line = _line(error)
    return line if line.startswith("[quantize]") else f"the model computes with keys and values itself: {line}"


def _line(error: Exception) -> str:
    """The first sentence of an error."""
    return str(error).partition("\n")[0].partition(". ")[0]


def _grouped(kept: Kept) -> Iterator[str]:
    """A text for each reason, such as `layers 0, 2-5 (ArraysCache has no quantised form)`."""
    for reason in dict.fromkeys(kept.values()):
        layers = sorted({place[0] for place in kept if kept[place] == reason})
        runs = [[n for _, n in run] for _, run in groupby(enumerate(layers), lambda item: item[1] - item[0])]
        yield f"layers {', '.join(f'{run[0]}-{run[-1]}' if run[1:] else str(run[0]) for run in runs)} ({reason})"
