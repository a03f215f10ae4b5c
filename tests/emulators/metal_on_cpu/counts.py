"""Exact counts of what a launch did. Unlike times, they are the same on any machine."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counts:
    """What one launch did, or several launches together.

    Bytes are what the lanes request: 32 lanes that read the same float count 128 bytes, even where the hardware would
    read it once. Operations that the compiler optimised away do not count, nor do accesses to constant memory, to a
    thread's own variables and to function constants.
    """

    mma: int = 0
    """8x8 matrix products of a SIMD group, in float32."""
    device_read: int = 0
    device_written: int = 0
    threadgroup_read: int = 0
    threadgroup_written: int = 0
    barriers: int = 0
    """Threadgroup barriers, counted once for each threadgroup that passes one."""
    shuffles: int = 0
    """Shuffles and reductions are counted once for each SIMD group."""
    reductions: int = 0
    transcendentals: int = 0
    """exp, exp2, log2 and tanh, counted once for each lane."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))
