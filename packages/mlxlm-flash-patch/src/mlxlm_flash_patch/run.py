"""`mlxlm-flash run`: finds a program, switches flash attention on, and starts the program as Python would.

The program ends as it would without mlxlm-flash, with the same exit code, exception or signal. Only with strict may a
success become a failure.
"""

import atexit
import contextlib
import os
import re
import runpy
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import flashattn_core
from flashattn_core.arguments import Precision

from .caches import held, kv_bits
from .patch import enable, joined, status, versions


@dataclass(frozen=True)
class Program:
    """A program, and the sys.argv and sys.path[0] with which Python would start it."""

    argv: list[str]
    folder: str  # becomes sys.path[0]
    start: Callable[[], object]


def find(command: str, arguments: Sequence[str]) -> Program:
    """The program that COMMAND [ARGS]... names. Raises LookupError with one line if there is none."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(command)) and arguments:
        command, *arguments = arguments
    if command == "-m" and arguments:
        name, *others = arguments
        # runpy replaces "-m" by the module's file, as python -m does.
        start = partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
        return Program(["-m", *others], os.getcwd(), start)
    script = next(iter(entry_points(group="console_scripts", name=command)), None)
    if script is not None:
        folder = sysconfig.get_path("scripts")
        argv = [os.path.join(folder, command), *arguments]
        return Program(argv, folder, lambda: sys.exit(script.load()()))
    if os.path.isfile(command):
        folder = os.path.dirname(os.path.realpath(command))
        return Program([command, *arguments], folder, lambda: _run_file(command))
    raise LookupError(f"{command!r} is neither a command that a package in this environment installs nor a file")


def switch_on(strict: bool, precision: Precision, **kv: Any) -> None:
    """Enables the patch. Prints a line on stderr now and one at exit. Raises what enable() and backends() raise."""
    found = joined(versions() | flashattn_core.backends())
    enable(strict=strict, precision=precision, **kv)
    how = "on" + ", strict" * strict + ", precision float32" * (precision == "float32")
    how += f", KV caches of {kv['kv_bits']} bits" if kv["kv_bits"] else ""
    say(f"flash attention {how}: {found}", sys.stderr)
    # At exit, Python first prints a traceback and waits for the program's threads, and then calls _say_what_ran().
    atexit.register(_say_what_ran, sys.stderr, os.getpid())


def start(program: Program, strict: bool) -> None:
    """Runs the program. With `strict`, a program that succeeds without flash attention exits with status 1."""
    sys.argv[:] = program.argv
    if not sys.flags.safe_path:
        sys.path[0] = program.folder
    process = os.getpid()
    try:
        program.start()
    except SystemExit as end:
        if not strict or end.code not in (None, 0) or os.getpid() != process:
            raise
    if strict and os.getpid() == process:  # not in a child that the program forked
        # Wait for other threads, which may still call attention. Python would wait for them anyway before it exits.
        this = threading.current_thread()
        while others := [t for t in threading.enumerate() if t is not this and not t.daemon]:
            others[0].join()
        if status().nothing_ran():
            say("strict: flash attention never ran", sys.stderr)
            sys.exit(1)


def say(line: str, stream: TextIO | None) -> None:
    if stream is None:  # the shell closed stderr; print(file=None) would write to stdout
        return
    with contextlib.suppress(OSError, ValueError):  # the stream is closed, or its disk is full
        print(f"[mlxlm-flash] {line}", file=stream, flush=True)


def _run_file(path: str) -> None:
    # runpy.run_path() would remove __main__ at the end of the file, although the program's threads may still run. It
    # would also leave __file__ relative. Python makes __file__ absolute, and leaves argv[0] as it is.
    main = ModuleType("__main__")
    main.__file__ = os.path.join(os.getcwd(), path)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), main.__file__, "exec", dont_inherit=True), vars(main))


def _say_what_ran(stream: TextIO, process: int) -> None:
    if os.getpid() == process:  # not in a child that the program forked
        now = status()
        say(" · ".join([f"flash attention ran: {now.counts()}", *now.replaced()]), stream)
        if kv_bits.current:
            most, unquantised = (n / 1e6 for n in held.most)
            say(f"quantised KV caches held at most {most:,.2f} MB; in 16 bits: {unquantised:,.2f} MB", stream)
