"""The soak's ways to switch the patch on, and its disturbances: bad calls, Ctrl-C, imports and another thread."""

import _thread
import contextlib
import importlib
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import flashattn_core
import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash

from tests.patch.soak_work import Broken


@contextlib.contextmanager
def by_enable(strict: bool = False) -> Iterator[None]:
    try:
        flash.enable(precision="float32")
        flash.enable(strict=strict)  # replaces the precision of the first enable()
        yield
    except BaseException:
        with contextlib.suppress(flash.FlashNeverRanError):  # a Ctrl-C may come before any kernel has run
            flash.disable()
        raise
    flash.disable()


@contextlib.contextmanager
def by_nested_blocks() -> Iterator[None]:
    with flash.enabled(), flash.enabled(precision="float32"), flash.enabled(strict=True):
        yield


@contextlib.contextmanager
def by_patch_model(of: list[nn.Module]) -> Iterator[None]:
    for model in of:
        flash.patch_model(model)
    try:
        yield
    finally:
        for model in of:
            flash.unpatch_model(model)


WAYS: dict[str, Callable[[list[nn.Module]], contextlib.AbstractContextManager[None]]] = {
    "enable()": lambda of: by_enable(),
    "enable(strict=True)": lambda of: by_enable(strict=True),
    "enabled() block": lambda of: flash.enabled(),
    "nested blocks": lambda of: by_nested_blocks(),
    "patch_model()": by_patch_model,
}


def bad_call(rng: random.Random) -> None:
    """Makes one of several calls that must raise an error."""
    q, k = mx.zeros((1, 8, 4, 16)), mx.zeros((1, 3, 4, 16))

    def fails_in_a_block() -> None:
        with flash.enabled(strict=True):
            raise ZeroDivisionError

    bad: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: flashattn_core.flash_attention(q, k, k)),
        (ValueError, lambda: flashattn_core.flash_attention(q, q, q, mask=mx.zeros((3, 5)) > 0)),
        (ValueError, lambda: flash.enable(precision="no such word")),
        (TypeError, lambda: flash.patch_model("no model")),
        (ZeroDivisionError, fails_in_a_block),
    ]
    error, call = rng.choice(bad)
    try:
        call()
    except error:
        return
    raise Broken(f"a bad call is not refused with {error.__name__}")


class SimulatedControlC(KeyboardInterrupt):
    """The Ctrl-C of a ControlC block, as opposed to the user's."""


class ControlC:
    """Raises SimulatedControlC after some seconds, unless the `with` block has ended by then."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._press)
        self._simulates = False

    def _press(self) -> None:
        self._simulates = True
        _thread.interrupt_main()

    def _raise(self, *_: object) -> None:
        raise SimulatedControlC if self._simulates else KeyboardInterrupt

    def __enter__(self) -> None:
        self._report, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._handler = signal.signal(signal.SIGINT, self._raise)
        try:
            self._timer.start()
        except KeyboardInterrupt:  # after an error here, Python does not call __exit__()
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        signal.signal(signal.SIGINT, self._handler)
        sys.unraisablehook = self._report

    def _unraisable(self, what: "sys.UnraisableHookArgs", /) -> None:
        """Hides Python's reports of a dropped Ctrl-C. Python drops a Ctrl-C in a callback of a weak reference."""
        if what.exc_type is not KeyboardInterrupt:
            self._report(what)


@contextlib.contextmanager
def arrival(name: str) -> Iterator[None]:
    """Imports module `name` again. After the block, sys.modules has the earlier module object again."""
    package, _, stem = name.rpartition(".")
    there = sys.modules.pop(name)
    try:
        importlib.import_module(name)
        yield
    finally:
        sys.modules[name] = there
        setattr(sys.modules[package], stem, there)


@contextlib.contextmanager
def another_thread_switches() -> Iterator[None]:
    """During the block, another thread switches the patch on and off all the time."""
    done = threading.Event()

    def switch() -> None:
        while not done.is_set():
            with flash.enabled():
                done.wait(0.002)
            done.wait(0.002)

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
