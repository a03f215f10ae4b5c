"""Ctrl-C during long calls on the CPU."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from . import _ext

_active = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends long calls on the CPU within a second, for as long as the block runs.

    MLX cannot be interrupted: KeyboardInterrupt comes when ``mx.eval`` returns, after the last kernel. In this block
    the calls that the main thread waits for end early: those of 1e9 multiply-adds and more that still run, or have not
    begun, half a second after the signal. Their outputs are NaN, never half a result, and so is all that is computed
    from them. Whoever goes on after KeyboardInterrupt throws away what was under way: weights, caches, files.

    What ``mx.async_eval`` began and nobody waits for runs to its end, and so do other threads' calls. A handler of
    SIGINT that was there before is called as always; one that the block puts in takes this one's place. Where SIGINT is
    ignored nothing changes. Blocks nest.

    Raises:
      ValueError: outside of the main thread, where Python takes no handlers.
    """
    global _active
    before = signal.getsignal(signal.SIGINT)
    if _active or not callable(before):
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        _ext.forget_interrupt()  # Python runs again, so nothing is waited for
        before(signum, frame)

    signal.signal(signal.SIGINT, handler)
    _ext.watch_interrupts()
    _active = True
    try:
        yield
    finally:
        _active = False
        _ext.stop_watching_interrupts()
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)
