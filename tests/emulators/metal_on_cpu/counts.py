"""Exact counts of what a launch did. Unlike times, they are the same on any machine."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counts:
    """Counts for one launch, or sums over several launches.

    Each lane's bytes count: if 32 lanes read the same float, that is 128 bytes. Operations that the compiler optimised
    away do not count. Accesses to constant memory, function constants and a thread's own variables do not count either.
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
