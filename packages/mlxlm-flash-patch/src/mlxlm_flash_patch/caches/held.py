"""Counts the bytes that quantised caches hold."""

import threading
import weakref
from typing import Any, NamedTuple


class Held(NamedTuple):
    """Bytes of all quantised caches, and the bytes that their keys and values would take in 16 bits."""

    quantised: int = 0
    in_16_bits: int = 0


_now, _most = Held(), Held()
_of = dict[int, tuple[int, Held]]()  # by id of a cache: how many scales its keys have, and its bytes
_lock = threading.RLock()  # RLock, because a cache may be deleted while this thread holds the lock


def largest() -> Held:
    """What all quantised caches together held when they held most."""
    return _most


def note(cache: Any) -> None:
    """Takes note of a cache's size. Caches call this after each change, and most changes leave the size as it is."""
    size = 0 if cache.keys is None else cache.keys[1].size
    before = _of.get(id(cache), (0, Held()))
    if size == before[0]:
        return
    if id(cache) not in _of:
        weakref.finalize(cache, _change, id(cache), 0, Held())
    words = 0 if cache.keys is None else cache.keys[0].size + cache.values[0].size
    _change(id(cache), size, Held(cache.nbytes, words * 32 // cache.bits * 2))


def _change(key: int, size: int, to: Held) -> None:
    global _now, _most
    with _lock:
        _, before = _of.pop(key, (0, Held()))
        if size:
            _of[key] = size, to
        _now = Held(*(now - old + new for now, old, new in zip(_now, before, to, strict=True)))
        _most = max(_most, _now)
