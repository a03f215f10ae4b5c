"""Chooses a kernel at the first GPU call of each kind. Later calls of the same kind get the choice from C++.

A kernel is used only after `check.py` found that it computes the same as the CPU on this machine. `contest.py` times
kernels if the kernel table does not know the fastest one, or if MLX has a fused kernel of its own. The results of both
are stored in the user's cache folder, for the next process.

FLASHATTN_CHECK: check and time "once" on this machine (default), "always" (in each process), or "never".
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, cast

import mlx.core as mx

from . import _ext, check, contest
from .contest import MLX, Times

When = Literal["once", "always", "never"]

# (device, kernel, *pipelines) -> the error of the kernel's check, or "" if it passed. Kept only for this process.
# From the cache folder, a process reads only checks that passed, so the next process checks a failed kernel again.
_verdicts: dict[tuple[str, ...], str] = {}
_lock = threading.Lock()  # not held during a check, so two threads may check the same kernel

_CLEARLY = 1.03  # MLX's own attention is used if flash attention takes at least this many times as long


@dataclass
class Decision:
    """Which kernel all calls of one kind run.

    kernel: None if all forward kernels or a backward kernel failed their check.
    wrong: why the first of these kernels failed; empty if `kernel` is not None.
    times: contestant -> seconds per call; empty if nothing was timed.
    """

    kernel: str | None
    failed: list[str] = field(default_factory=list)
    wrong: str = ""
    times: Times = field(default_factory=dict)

    def left(self) -> tuple[float, float] | None:
        """Returns seconds per call (MLX's, the kernel's) if MLX's own attention is clearly faster, otherwise None. It
        is enough if MLX wins for independent calls or for a chain of calls. See contest.py."""
        if self.kernel is None or MLX not in self.times or self.kernel not in self.times:
            return None
        both = zip(self.times[MLX], self.times[self.kernel], strict=True)
        return max(
            (pair for pair in both if pair[0] * _CLEARLY <= pair[1]), key=lambda pair: pair[1] / pair[0], default=None
        )


def decide(call: _ext.Arguments, stream: Any = None) -> Decision:
    """Chooses a kernel for calls like this one, and stores the choice. Raises NoKernelError if there is none."""
    on = _ext.stream_of(stream)
    _compile_what_follows(call, on)
    decision = decision_for(call, on)
    _ext.settle(
        call, on.device, decision.kernel, decision.failed, decision.wrong, decision.left(), contest.in_words(call)
    )
    return decision


def _compile_what_follows(call: _ext.Arguments, stream: mx.Stream) -> None:
    """On CUDA, compiles the kernel of the next decode step in another thread, if this call has many queries. Compiling
    takes about a second, and a program that ends earlier waits for the thread. If compiling fails, the decode step
    itself raises the error."""
    if (
        _ext.backend_of(stream.device) != "cuda"
        or call.kind()[4] <= _ext.max_cuda_decode_len
        or when_to_check() == "never"
    ):
        return
    step = call.with_one_query()
    [(kernel, _), *_] = _ext.candidates(step, "cuda")
    threading.Thread(target=_ext.compile, args=(step, kernel, stream.device, True)).start()


def decision_for(call: _ext.Arguments, stream: mx.Stream) -> Decision:
    """Times the kernels if needed, and checks them, the fastest first, until one passes."""
    backend, decision = _ext.backend_of(stream.device), Decision(None)
    candidates = _ext.candidates(call, backend)
    first = candidates[0][0]
    decision.times = _times(call, [name for name, is_timed in candidates if is_timed or name == first], stream)
    # If nothing was timed, sorted() keeps the order of the candidates.
    for kernel in sorted((name for name, _ in candidates), key=lambda name: sum(decision.times.get(name, [inf]))):
        if kernel.partition("@")[0] in decision.failed:
            continue
        wrong = wrong_with(call, kernel, stream)
        if not wrong:
            decision.kernel, decision.wrong = kernel, ""
            break
        decision.failed.append(kernel.partition("@")[0])
        decision.wrong = decision.wrong or wrong
    gradient = _ext.backward_kernel(call, backend) if call.is_traced and decision.kernel else None
    if gradient and (wrong := wrong_with(call, gradient, stream)):
        return Decision(None, wrong=wrong)
    if backend == "cuda":
        for kernel in filter(None, (decision.kernel, gradient)):
            _ext.compile(call, kernel, stream.device, False)
    return decision


def when_to_check() -> When:
    """The value of FLASHATTN_CHECK. Raises ValueError if it is invalid."""
    wanted = os.environ.get("FLASHATTN_CHECK", "once")
    if wanted not in ("once", "always", "never"):
        raise ValueError(f"[flash_attention] FLASHATTN_CHECK is {wanted!r}, expected 'once', 'always' or 'never'")
    return cast(When, wanted)


def wrong_with(call: _ext.Arguments, kernel: str, stream: mx.Stream) -> str:
    """Checks the kernel for such calls. Returns the error, or "" if there is none or FLASHATTN_CHECK is "never".

    Raises NoKernelError if there is too little memory for the check. The next call then checks again.
    """
    when = when_to_check()
    if when == "never":
        return ""
    backend = _ext.backend_of(stream.device)
    pipelines = _ext.pipelines(call, kernel, backend)
    key = (str(stream.device), kernel, *pipelines)
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
    on_disk = "\n".join([_ext.software(stream.device), kernel, *pipelines, ""])
    wrong = ""
    if when == "always" or _ext.read_kept("checked", on_disk) != "passed":
        if backend == "cuda":
            _ext.compile(call, kernel, stream.device, True)
        try:
            wrong = check.of_call(call, kernel, stream)
        except MemoryError as error:
            raise _ext.NoKernelError(f"[flash_attention] {error}") from error
        if not wrong:
            _ext.keep("checked", on_disk, "passed")
    with _lock:
        return _verdicts.setdefault(key, wrong)


def _times(call: _ext.Arguments, kernels: Sequence[str], stream: mx.Stream) -> Times:
    """Times these kernels, and MLX's own attention if it may replace them. Times nothing if there is one contestant."""
    when = when_to_check()
    if when == "never":
        return {}
    # flash_attention() shares its decision with flash_or_faster(), which needs MLX's time.
    may_leave = call.rounds and call.kernel == "auto"
    contestants = [*kernels, *([MLX] if may_leave and contest.mlx_is_fused(call, stream) else [])]
    if len(contestants) == 1:
        return {}
    key = "\n".join([_ext.software(stream.device), contest.in_words(call), *contestants, ""])
    kept = "" if when == "always" else _ext.read_kept("timed", key)
    if kept:
        return cast(Times, json.loads(kept))
    times = contest.times(call, contestants, stream)
    if times:
        _ext.keep("timed", key, json.dumps(times))
    return times
