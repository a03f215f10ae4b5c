"""What a launch did, counted exactly: the part of performance that does not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Counts:
    """The operations of one launch. They add up (`a + b`) and scale (`counts * 14`).

    Bytes are what the lanes ask for: 32 lanes that read the same float count 128 bytes, as they would in a request of
    the hardware, whatever a cache makes of it. Atomic operations count as a read and a write. What the compiler has
    optimised away does not count, nor do a thread's own variables and the function constants.
    """

    mma: dict[str, int] = field(default_factory=dict)
    """8x8 matrix products of a SIMD group, by the type of A and B: "float", "half", "bfloat", or "float*half"."""
    device_read: int = 0
    device_written: int = 0
    constant_read: int = 0
    """More than on a GPU, whose compiler keeps a constant in a register across barriers and SIMD-group operations."""
    threadgroup_read: int = 0
    threadgroup_written: int = 0
    barriers: int = 0
    """Threadgroup barriers, once for each threadgroup that passes one."""
    simdgroup_barriers: int = 0
    """As the following two, once for each SIMD group; a shuffle of a vector is as many as it has elements."""
    shuffles: int = 0
    reductions: int = 0
    transcendentals: int = 0
    """exp, exp2, log, tanh, sin, sqrt, rsqrt, pow and the like, once for each lane and element."""

    def __add__(self, other: Counts) -> Counts:
        return self._combined(other, lambda mine, its: mine + its)

    def __mul__(self, factor: int) -> Counts:
        return self._combined(self, lambda mine, _: mine * factor)

    __rmul__ = __mul__

    def _combined(self, other: Counts, combine: Callable[[int, int], int]) -> Counts:
        numbers = {
            each.name: combine(getattr(self, each.name), getattr(other, each.name))
            for each in fields(self)
            if each.name != "mma"
        }
        types = sorted(self.mma.keys() | other.mma.keys())
        return Counts({type_: combine(self.mma.get(type_, 0), other.mma.get(type_, 0)) for type_ in types}, **numbers)
