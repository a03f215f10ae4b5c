"""Settles what calls of one kind run on a GPU: the first of them asks, every later one looks the answer up in C++.

A kernel must have shown on this machine that it computes what the CPU's do, see `check.py`. Where several kernels can
run the call and nobody has measured which is faster, and where MLX has a fused kernel of its own, `contest.py` times
them. Verdicts and times are kept in the user's folder of caches, for the next process.

FLASHATTN_CHECK: "once", the default; "always", in each process; "never", which times nothing either.
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

_verdicts: dict[tuple[str, ...], str] = {}  # pipelines -> what is wrong with the kernel, for the whole process
_lock = threading.Lock()  # not held while a kernel is checked: another thread then checks it, too

_CLEARLY = 1.03  # how much slower flash attention must be for MLX's own to be taken


@dataclass
class Decision:
    """What calls of the kind take.

    kernel: None where every kernel failed its check; `wrong` says what the first one did.
    times: seconds of one call; empty where nothing was timed.
    """

    kernel: str | None
    failed: list[str] = field(default_factory=list)
    wrong: str = ""
    times: Times = field(default_factory=dict)

    def left(self) -> tuple[float, float] | None:
        """Seconds of MLX's own attention and of the kernel, where MLX's own is clearly faster in one way of calling."""
        if self.kernel is None or MLX not in self.times or self.kernel not in self.times:
            return None
        both = zip(self.times[MLX], self.times[self.kernel], strict=True)
        return max(
            (pair for pair in both if pair[0] * _CLEARLY <= pair[1]), key=lambda pair: pair[1] / pair[0], default=None
        )


def decide(call: _ext.Arguments, stream: Any = None) -> Decision:
    """Settles calls like this one on the stream. Raises NoKernelError where no kernel covers them."""
    on = _ext.stream_of(stream)
    _compile_what_follows(call, on)
    decision = decision_for(call, on)
    _ext.settle(
        call, on.device, decision.kernel, decision.failed, decision.wrong, decision.left(), contest.in_words(call)
    )
    return decision


def _compile_what_follows(call: _ext.Arguments, stream: mx.Stream) -> None:
    """Has CUDA compile, in the background, the kernel of the step that follows a prompt: it takes as long as this
    call's. What goes wrong is said when such a step comes. A program that ends waits for it, about a second."""
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
    """Times what has to be timed, and checks kernels from the fastest on until one is right."""
    backend, decision = _ext.backend_of(stream.device), Decision(None)
    candidates = _ext.candidates(call, backend)
    first = candidates[0][0]
    decision.times = _times(call, [name for name, is_timed in candidates if is_timed or name == first], stream)
    # sorted() keeps their order where nothing was timed.
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
    """What FLASHATTN_CHECK says. Raises ValueError for another word."""
    wanted = os.environ.get("FLASHATTN_CHECK", "once")
    if wanted not in ("once", "always", "never"):
        raise ValueError(f"[flash_attention] FLASHATTN_CHECK is {wanted!r}, expected 'once', 'always' or 'never'")
    return cast(When, wanted)


def wrong_with(call: _ext.Arguments, kernel: str, stream: mx.Stream) -> str:
    """What is wrong with the kernel for such calls, in words; empty if nothing is, or if nothing is to be checked.

    Raises NoKernelError where there is no memory for the check: the next call is checked again.
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
    """Times these kernels, and MLX's own attention if the call may be left to it; empty if nothing is to be chosen."""
    when = when_to_check()
    if when == "never":
        return {}
    # MLX is timed for flash_attention(), too, though it leaves no call to MLX: the patch shares the decision.
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
