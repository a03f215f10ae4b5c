"""Measures work with the patch off and on: time, peak memory, attention's share of the time, and which attention ran.

Before each trial, MLX and the C library return freed memory to the system. Otherwise one arm could reuse memory that
the other arm has allocated. Peak memory counts only memory beyond that in use before the trial, so it does not include
the loaded model or the other arm's results.
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
from flash_evals.results.errors import FAILURES, EvalError, failing, one_line

Result = TypeVar("Result")


def arms(number: int) -> tuple[Arm, Arm]:
    """Returns the arms in the order of trial `number`. The order alternates, so that throttling favours neither arm."""
    return ARMS if number % 2 == 0 else ("on", "off")


def trial(what: str, number: int, measure: Callable[[Arm], Figures]) -> Trial[Figures]:
    """Measures the same work with each arm. If an arm fails, raises an EvalError that names `what`."""
    measured = {}
    for name in arms(number):
        with failing(f"{what} fails with the patch {name}"):
            measured[name] = measure(name)
    return Trial(**measured, order=arms(number))


def failures(what: str, measure: Callable[[Arm], object]) -> dict[Arm, str]:
    """Tries the work with each arm. Returns the errors of arms that cannot do it; raises EvalError if both cannot."""
    failed: dict[Arm, str] = {}
    for name in ARMS:
        try:
            measure(name)
        except FAILURES as error:
            failed[name] = one_line(error)
    if len(failed) == len(ARMS):
        raise EvalError(f"{what} fails with the patch off: {failed['off']}; and with the patch on: {failed['on']}")
    return failed


def run(
    name: Arm, work: Callable[[], Result], tokens: int, flash_did: Flash, precision: Precision = "input"
) -> tuple[Result, Measurement]:
    """Runs `work`, which reads `tokens` tokens, once with one arm. If `name` is "on", adds the counts to `flash_did`.

    work: must evaluate its result before it returns. precision: the patch's precision, as enable() takes it.

    Raises EvalError if flash attention ran although `name` is "off", because then there is nothing to compare with.
    """
    mx.synchronize()
    patch = flash.enabled(precision=precision) if name == "on" else nullcontext()
    with warnings.catch_warnings(), patch, peak_memory() as peak:
        warnings.simplefilter("ignore", flash.FlashFallbackWarning)  # fallbacks are counted instead
        before = _counts()
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        measurement = Measurement(seconds, tokens / seconds, peak() / 1e6)
        did = [dict(now - earlier) for now, earlier in zip(_counts(), before, strict=True)]  # only counts that grew
    if name == "off" and did[0]:
        raise EvalError(
            "flash-eval cannot measure with the patch off, because something else has switched it on: "
            "start flash-eval without `mlxlm-flash run`"
        )
    if name == "on":
        flash_did.add(Flash(*did))
    return result, measurement


def attention_share(name: Arm, work: Callable[[], object], precision: Precision = "input") -> float | None:
    """Runs the work once with one arm. Returns attention's share of the work's time, 0 to 1.

    MLX is lazy. So each call's query, key and value are evaluated before the clock starts, and its output before the
    clock stops. Masks are not evaluated before the clock starts, because flash attention needs no array for most masks.
    If a mask array is computed, its time counts as attention's. Returns None if observe() saw no call. In Gemma 2, for
    example, one function computes attention and its projections.
    """
    seconds: list[float] = []

    def timed(attention: Callable[..., mx.array], *arguments: Any, **others: Any) -> mx.array:
        mx.eval(arguments[:4])  # query, key and value, perhaps after `self`; eval() ignores other objects
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
    """Returns counts since the process began: kernel -> calls, reason -> fallbacks, reason -> calls left to MLX."""
    now = flash.status()
    return Counter(flashattn_core.stats()), Counter(now.fallbacks), Counter(now.left)


@cache
def memory_method() -> str:
    """How peak memory is measured here, in words for the result files.

    On a Linux CPU it is the resident set, because MLX's counter misses memory that kernels allocate themselves.
    """
    if mx.default_device() != mx.gpu and os.access("/proc/self/clear_refs", os.W_OK):
        return "peak resident set of the process during a trial, minus its resident set before the trial"
    return "peak of MLX's allocator during a trial, minus its active memory before, plus flash's scratch on a CPU"


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switches Python's garbage collection off inside the block, as timeit does, because collecting takes time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the block's peak memory use so far, in bytes above the use at the block's start.

    First frees the scratch memory that flash's threads keep for their next call. Otherwise the block could reuse this
    memory, and reused memory does not count.
    """
    mx.clear_cache()
    flashattn_core.release_scratch()
    if _is_glibc:
        _libc.malloc_trim(0)  # returns freed memory to the system, because reused memory does not count
    with no_garbage_collection():
        if "resident" in memory_method():
            Path("/proc/self/clear_refs").write_text("5")  # resets the process's peak resident set, VmHWM
            before = _status_bytes("VmRSS")
            yield lambda: max(0, _status_bytes("VmHWM") - before)
        else:
            mx.reset_peak_memory()
            active = mx.get_active_memory()
            # MLX's allocator does not count the scratch memory that the work needed and flash's threads still keep.
            # release_scratch() frees it and returns its bytes.
            yield lambda: max(0, mx.get_peak_memory() - active) + flashattn_core.release_scratch()


def _status_bytes(name: str) -> int:
    [kilobytes] = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(kilobytes) * 1024


_libc = ctypes.CDLL(None)
_is_glibc = hasattr(_libc, "malloc_trim")
if _is_glibc:
    # malloc_trim() frees only the first arena completely, so all threads are made to share the first arena.
    _M_ARENA_MAX = -8
    _libc.mallopt(_M_ARENA_MAX, 1)
