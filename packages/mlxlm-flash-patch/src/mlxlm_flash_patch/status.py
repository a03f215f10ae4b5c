"""What is patched, what ran and what did not, at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from flashattn_core import _ext

from . import instance, patch
from .route import route

DISTRIBUTIONS = ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch")


@dataclass(frozen=True)
class Left:
    """Calls of one kind that were left to MLX's own attention, and what a call takes here, in seconds."""

    calls: int
    mlx_seconds: float
    flash_seconds: float

    def __str__(self) -> str:
        mlx, flash = 1e3 * self.mlx_seconds, 1e3 * self.flash_seconds
        return f"{count(self.calls, 'call')} (faster here: {mlx:.3g} against {flash:.3g} ms)"


@dataclass(frozen=True)
class Status:
    """The state of the patch; `str()` of it is for reading.

    Attributes:
      enabled: whether enable() or an enabled() block is in force.
      strict: whether one of them asked for that.
      patched: modules whose attention is routed.
      instances: how many models given to patch_model() are alive.
      calls: kernel → calls that really ran, since the patch was last switched on.
      fallbacks: reason → calls that went to mlx-lm's own attention, since then.
      left: kind of call, in words → calls that were left to MLX's own attention, which is faster here, since then.
      foreign: module → whose function sits there: left alone.
      versions: distribution → its version.
    """

    enabled: bool
    strict: bool
    patched: tuple[str, ...]
    instances: int
    calls: Mapping[str, int]
    fallbacks: Mapping[str, int]
    left: Mapping[str, Left]
    foreign: Mapping[str, str]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        how = f"{'on' if self.enabled else 'off'}{', strict' if self.strict else ''}"
        where = f"{count(len(self.patched), 'module')}, {count(self.instances, 'model instance')}"
        lines = [
            f"flash attention {how}: {where}",
            f"calls: {self.counts()}",
            *(f"left alone: {place} holds {holder}" for place, holder in self.foreign.items()),
            " · ".join(f"{name} {number}" for name, number in self.versions.items()),
        ]
        return "\n".join(lines)

    def counts(self) -> str:
        """What ran, and what did not, in words."""
        ran = f"{tally(self.calls)} · fallbacks: {tally(self.fallbacks)}"
        left = "; ".join(map(str, sorted(self.left.values(), key=lambda each: -each.calls)))
        return f"{ran} · left to MLX: {left}" if left else ran


def status() -> Status:
    """What is patched now, and what was called since the patch was last switched on: a :class:`Status`."""
    with route.lock:
        strict, fallbacks = route.strict, dict(route.fallbacks)
    return Status(
        enabled=patch.is_on(),
        strict=strict,
        patched=patch.patched_places(),
        instances=instance.patched_instances(),
        calls=patch.kernel_calls(),
        fallbacks=fallbacks,
        left={words: Left(calls, mlx, flash) for words, mlx, flash, calls in _ext.left_calls()},
        foreign=patch.foreign_places(),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    return {name: version(name) for name in DISTRIBUTIONS}


def tally(counts: Mapping[str, int]) -> str:
    """``cpu_prefill 24, cpu_decode 480``, or ``none``."""
    return ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "none"


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
