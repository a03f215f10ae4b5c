"""What a launch did, counted exactly: the part of performance that does not depend on the machine."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counts:
    """The operations of one launch. They add up.

    Bytes are what the lanes ask for: 32 lanes that read the same float count 128 bytes, as they would in a request of
    the hardware, whatever a cache makes of it. What the compiler has optimised away does not count, nor do constant
    memory, a thread's own variables and the function constants.
    """

    mma: int = 0
    """8x8 matrix products of a SIMD group, in float32."""
    device_read: int = 0
    device_written: int = 0
    threadgroup_read: int = 0
    threadgroup_written: int = 0
    barriers: int = 0
    """Threadgroup barriers, once for each threadgroup that passes one."""
    shuffles: int = 0
    """As reductions, once for each SIMD group."""
    reductions: int = 0
    transcendentals: int = 0
    """exp, exp2, log2 and tanh, once for each lane."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))
