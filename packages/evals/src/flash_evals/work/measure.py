"""The two arms and how work is measured under them: time, peak memory, attention's share, what really ran.

A trial is measured cold: nothing of an earlier one lies in the free lists of MLX or the C library, so
neither arm pays for the other's memory or lives off it. Peak memory is what the work needs on top of what
was there when it began: the loaded model and the other arm's results are no part of it.
"""

import ctypes
import gc
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
from flashattn_core.arguments import Precision

from flash_evals.results.arms import ARMS, Arm, Figures, Flash, Measurement, Trial
from flash_evals.results.errors import EvalError, failing

Result = TypeVar("Result")


def arms(number: int) -> tuple[Arm, Arm]:
    """Who goes first takes turns, so that a machine that warms up or throttles favours neither."""
    return ARMS if number % 2 == 0 else ("on", "off")


def trial(what: str, number: int, measure: Callable[[Arm], Figures]) -> Trial[Figures]:
    """Measures the same under both arms. Raises EvalError, in the words of `what`, if one does not take it."""
    measured = {}
    for name in arms(number):
        with failing(f"{what} fails with the patch {name}"):
            measured[name] = measure(name)
    return Trial(**measured, order=arms(number))


def run(
    name: Arm, work: Callable[[], Result], tokens: int, flash_did: Flash, precision: Precision = "input"
) -> tuple[Result, Measurement]:
    """Does the work, which is of so many tokens, once under one arm. It evaluates what it returns before it returns it.

    precision: of the arm that is on, as enable() takes it.

    Raises EvalError if flash ran in the arm that is off: then there is nothing to compare with.
    """
    mx.synchronize()
    patch = flash.enabled(precision=precision) if name == "on" else nullcontext()
    with warnings.catch_warnings(), patch, peak_memory() as peak:
        warnings.simplefilter("ignore", flash.FlashFallbackWarning)  # counted here, and shown in the result
        before = _counts()
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        measurement = Measurement(seconds, tokens / seconds, peak() / 1e6)
        did = [dict(now - earlier) for now, earlier in zip(_counts(), before, strict=True)]  # counters keep what grew
    if name == "off" and did[0]:
        raise EvalError(
            "flash-eval cannot measure with the patch off, because something else has switched it on: "
            "start flash-eval without `mlxlm-flash run`"
        )
    if name == "on":
        flash_did.add(Flash(*did))
    return result, measurement


def attention_share(name: Arm, work: Callable[[], object], precision: Precision = "input") -> float | None:
    """Does the work once under one arm: the part of its time, 0 to 1, that calls of attention took.

    MLX is lazy: a call only notes what is to be computed, and later everything is computed in one go. Here what goes
    into a call is waited for before the clock starts, and what comes out of it before the clock stops. Masks are not:
    flash attention does without most of them, so an array that is computed for attention alone is attention's. None if
    there was no call at a place where attention stands alone: Gemma 2's, with its projections, does not.
    """
    seconds: list[float] = []

    def timed(attention: Callable[..., mx.array], *arguments: Any, **others: Any) -> mx.array:
        mx.eval(arguments[:4])  # query, key and value, also behind a `self`; what is no array is passed over
        start = time.perf_counter()
        output = attention(*arguments, **others)
        mx.eval(output)
        seconds.append(time.perf_counter() - start)
        return output

    def watched() -> None:
        with flash.observe(timed):
            work()

    _, whole = run(name, watched, 0, Flash(), precision)
    return sum(seconds) / whole.seconds if seconds else None


def _counts() -> tuple[Counter[str], Counter[str], Counter[str]]:
    """How often each kernel ran, each reason to fall back came, and each kind was left to MLX in this process."""
    now = flash.status()
    left = Counter({kind: left.calls for kind, left in now.left.items()})
    return Counter(flashattn_core.stats()), Counter(now.fallbacks), left


@cache
def memory_method() -> str:
    """How peak memory is measured here, in words for the result files.

    On a Linux CPU MLX's own counter would miss scratch memory that a kernel allocates by itself.
    """
    if mx.default_device() != mx.gpu and os.access("/proc/self/clear_refs", os.W_OK):
        return "peak resident set of the process during a trial, minus its resident set before the trial"
    return "peak of MLX's allocator during a trial, minus its active memory before, plus flash's scratch on a CPU"


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """As in timeit: garbage of earlier work would count as memory saved, and as time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many bytes above the start the highest point since then has been.

    What flash's threads keep for their next call is freed before: the work pays for all that it needs, and for nothing
    that earlier work needed.
    """
    mx.clear_cache()
    flashattn_core.release_scratch()
    if _is_glibc:
        _libc.malloc_trim(0)  # what it keeps stays resident: an allocation out of it would not be seen
    with no_garbage_collection():
        if "resident" in memory_method():
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
            before = _status_bytes("VmRSS")
            yield lambda: max(0, _status_bytes("VmHWM") - before)
        else:
            mx.reset_peak_memory()
            active = mx.get_active_memory()
            # Only what the work has needed is kept by now, and MLX's allocator knows nothing of it.
            yield lambda: max(0, mx.get_peak_memory() - active) + flashattn_core.release_scratch()


def _status_bytes(name: str) -> int:
    [kilobytes] = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(kilobytes) * 1024


_libc = ctypes.CDLL(None)
_is_glibc = hasattr(_libc, "malloc_trim")
if _is_glibc:
    # malloc_trim() keeps the last free piece of every arena but the first. So all threads get that one, from here on.
    _M_ARENA_MAX = -8
    _libc.mallopt(_M_ARENA_MAX, 1)
