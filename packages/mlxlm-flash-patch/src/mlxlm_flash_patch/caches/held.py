"""Counts the bytes that quantised caches hold."""

import threading
import weakref
from typing import Any, NamedTuple


class Held(NamedTuple):
    """Bytes of all quantised caches, and the bytes that their keys and values would take in 16 bits."""

    quantised: int = 0
    in_16_bits: int = 0


_now, _most = Held(), Held()
_of = dict[int, Held]()  # by id of a cache
_lock = threading.RLock()  # RLock, because a cache may be deleted while this thread holds the lock


def largest() -> Held:
    """What all quantised caches together held when they held most."""
    return _most


def note(cache: Any) -> None:
    """Takes note of a cache's size. Caches call this after each change, and most changes leave the size as it is."""
    quantised, before = cache.nbytes, _of.get(id(cache))
    if quantised == (before or Held()).quantised:
        return
    if before is None:
        weakref.finalize(cache, _change, id(cache), None)
    words = cache.keys[0].size + cache.values[0].size
    _change(id(cache), Held(quantised, words * 32 // cache.bits * 2))


def _change(key: int, to: Held | None) -> None:
    global _now, _most
    with _lock:
        before, after = _of.pop(key, Held()), to or Held()
        if to is not None:
            _of[key] = to
        _now = Held(*(now - old + new for now, old, new in zip(_now, before, after, strict=True)))
        _most = max(_most, _now)
