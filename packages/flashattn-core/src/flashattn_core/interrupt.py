"""interruptible(): Ctrl-C ends long calls on the CPU early."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from . import _ext

_active = False


@contextmanager
def interruptible() -> Iterator[None]:
    """In the block, Ctrl-C ends long calls on the CPU within a second.

    MLX cannot be interrupted: Python raises KeyboardInterrupt when ``mx.eval`` returns, after the last kernel. In this
    block, calls that the main thread waits for end early if they are not finished half a second after Ctrl-C. Calls of
    less than 1e9 multiply-adds never end early. All outputs of a call that ends early are NaN, and so is everything
    computed from them. A program that goes on must discard these results: weights, caches, files.

    Other threads' calls run to their end. So does work of ``mx.async_eval`` that the main thread does not wait for. A
    SIGINT handler set before the block is still called. A handler set inside the block replaces the block's handler. If
    SIGINT is ignored, nothing changes. Blocks nest.

    Raises:
      ValueError: outside the main thread, because Python sets signal handlers only there.
    """
    global _active
    before = signal.getsignal(signal.SIGINT)
    if _active or not callable(before):
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        _ext.forget_interrupt()  # the main thread waits for no call while Python code runs
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
