"""What the patch puts in the place of things of mlx-lm, and what each of these stands for.

This is the one record of what is ours. An entry lives as long as somebody holds the object that was put in place.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from .direct import StandIn
from .route import Way


class Ours(NamedTuple):
    original: Any  # mlx-lm's own
    way: Way  # whose calls are flash attention


_ours = WeakKeyDictionary[Any, Ours]()
_in_use = WeakValueDictionary[Ours, Any]()


def known(held: object) -> Ours | None:
    """What this object stands for, if the patch made it."""
    return _ours.get(held) if isinstance(held, FunctionType | StandIn) else None


def instead_of(original: Any, way: Way, make: Callable[[Any, Way], Any]) -> Any:
    """What stands for `original`: the same object each time, while somebody holds it."""
    entry = Ours(original, way)
    made = _in_use.get(entry)
    if made is None:
        made = _in_use[entry] = make(original, way)
        _ours[made] = entry
    return made
