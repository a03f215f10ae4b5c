"""Records of a comparison's two arms, patch off and patch on: their time and memory, and the calls that ran."""

from collections import Counter
from collections.abc import Iterable
from typing import Generic, Literal, TypeVar

from msgspec import field

from flash_evals.results.record import Amount, Count, Record

Arm = Literal["off", "on"]
Figures = TypeVar("Figures")
ARMS: tuple[Arm, Arm] = ("off", "on")


class Measurement(Record):
    """The time and memory that one arm took."""

    seconds: Amount
    tokens_per_s: Amount
    peak_memory_mb: Amount  # beyond what was in use when the work began


class ByArm(Record, Generic[Figures]):
    """The figures of each arm."""

    off: Figures
    on: Figures

    def __getitem__(self, name: Arm) -> Figures:
        return self.off if name == "off" else self.on


class Trial(ByArm[Figures], Generic[Figures]):
    """The figures of one trial, in which each arm did the same work once."""

    order: tuple[Arm, Arm]


class Flash(Record):
    """The calls that the patch counted while it was on."""

    calls: dict[str, Count] = field(default_factory=dict)  # kernel -> calls that ran
    fallbacks: dict[str, Count] = field(default_factory=dict)  # reason -> calls that fell back to MLX
    left: dict[str, Count] = field(default_factory=dict)  # kind of call -> calls left to MLX, because MLX is faster

    def add(self, other: "Flash") -> None:
        self.calls = dict(Counter(self.calls) + Counter(other.calls))
        self.fallbacks = dict(Counter(self.fallbacks) + Counter(other.fallbacks))
        self.left = dict(Counter(self.left) + Counter(other.left))

    @classmethod
    def sum(cls, parts: Iterable["Flash"]) -> "Flash":
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def __str__(self) -> str:
        calls = ", ".join(f"{kernel} {count:,} calls" for kernel, count in sorted(self.calls.items())) or "no calls"
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in sorted(self.fallbacks.items()))
        fallbacks = f"{sum(self.fallbacks.values()):,} fallbacks" + (f" ({reasons})" if reasons else "")
        left = f", left to MLX's own attention: {sum(self.left.values()):,} calls" if self.left else ""
        return f"{calls}, {fallbacks}{left}"
