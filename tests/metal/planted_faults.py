"""A fault planted in a kernel, and that it is noticed: what test_mutations.py and test_backward_mutations.py share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from metal_on_cpu import MetalError

BARRIER = "threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
SHARED_BARRIER = "FLASHATTN_BARRIER;"  # in gpu/kernels


@dataclass(frozen=True)
class Fault:
    kernel: str
    old: str
    new: str = ""
    occurrence: int = 0
    lengths: tuple[int, int] | None = None
    mask: object = "causal"
    options: dict[str, object] = field(default_factory=dict)
    dim: int = 40
    bits: int | None = None  # of keys and values, if they are quantised

    @property
    def query_and_key_lengths(self) -> tuple[int, int]:
        """Unless given, what the kernel is for."""
        return self.lengths or ((1, 70) if "decode" in self.kernel else (33, 70))

    # The source with the fault in it, or as it was.
    def plant(self, source: str) -> str:
        if f"metal/kernels/{self.kernel.removeprefix('metal_')}.metal" not in source:
            return source  # another launch of the same call
        parts = source.split(self.old)
        if len(parts) < self.occurrence + 2:
            return source  # another launch, of the same file
        head, tail = parts[: self.occurrence + 1], parts[self.occurrence + 1 :]
        return self.old.join(head) + self.new + self.old.join(tail)


def assert_is_noticed(fault: Fault, call: Callable[[Callable[[str], str]], None]) -> None:
    """`call` runs the kernels, with the given edit of their source, and compares their results."""
    call(lambda source: source)  # without the fault nothing is noticed
    planted = []

    def edit(source: str) -> str:
        edited = fault.plant(source)
        planted.append(edited != source)
        return edited

    with pytest.raises((MetalError, AssertionError)):
        call(edit)
    assert any(planted), "the kernels no longer have this text: plant the fault elsewhere"
