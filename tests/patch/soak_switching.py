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
    """The Ctrl-C of a control_c() block, as opposed to the user's."""


@contextlib.contextmanager
def control_c(seconds: float) -> Iterator[None]:
    """Raises SimulatedControlC after some seconds, unless the block has ended by then. The user's Ctrl-C raises
    KeyboardInterrupt as usual."""
    pressed = threading.Event()  # set while a simulated Ctrl-C is pending

    def press() -> None:
        pressed.set()
        _thread.interrupt_main()

    def interrupt(*_: object) -> None:
        is_simulated = pressed.is_set()
        pressed.clear()
        raise SimulatedControlC if is_simulated else KeyboardInterrupt

    def report(what: "sys.UnraisableHookArgs", /) -> None:
        """Leaves out the simulated Ctrl-C. Python drops a Ctrl-C in a callback of a weak reference, and reports it."""
        if not issubclass(what.exc_type, SimulatedControlC):
            usual_report(what)

    timer = threading.Timer(seconds, press)
    handler = signal.getsignal(signal.SIGINT)
    usual_report, sys.unraisablehook = sys.unraisablehook, report
    try:
        signal.signal(signal.SIGINT, interrupt)
        timer.start()
        yield
    finally:
        try:
            timer.cancel()
            if timer.is_alive():
                timer.join()
        finally:
            sys.unraisablehook = usual_report
            for _ in range(2):  # if a Ctrl-C is pending, signal() raises it and changes nothing
                with contextlib.suppress(SimulatedControlC):
                    signal.signal(signal.SIGINT, handler)


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
