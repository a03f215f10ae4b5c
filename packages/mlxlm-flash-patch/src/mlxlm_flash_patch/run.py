"""`mlxlm-flash run`: finds a program, switches flash attention on, and starts the program as Python would.

The program ends as it would without mlxlm-flash, with the same exit code, exception or signal. Only with strict may a
success become a failure.
"""

import atexit
import contextlib
import importlib.util
import os
import re
import runpy
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TextIO

import flashattn_core
from flashattn_core.arguments import Precision

from .caches import kv_bits as caches
from .patch import enable, joined, status, versions


@dataclass(frozen=True)
class Program:
    """A program, and the sys.argv and sys.path[0] with which Python would start it."""

    argv: list[str]
    folder: str  # becomes sys.path[0]
    start: Callable[[], object]

    @property
    def is_launcher(self) -> bool:
        """Whether the program computes no attention itself, but starts processes that may do so."""
        return os.path.basename(self.argv[0]) == "mlx.launch"


def find(command: str, arguments: Sequence[str]) -> Program:
    """The program that COMMAND [ARGS]... names. Raises LookupError with one line if there is none."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(command)):
        if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
            raise LookupError(f"{command} needs a file or -m MODULE next: mlxlm-flash run takes no other Python option")
        command, *arguments = arguments
    if command == "-m":
        if not arguments:
            raise LookupError("-m needs the name of a module next")
        return _module(arguments[0], arguments[1:])
    script = next(iter(entry_points(group="console_scripts", name=command)), None)
    if script is not None:
        folder = sysconfig.get_path("scripts")
        argv = [os.path.join(folder, command), *arguments]
        return Program(argv, folder, lambda: sys.exit(script.load()()))
    if os.path.isfile(command):
        folder = os.path.dirname(os.path.realpath(command))
        return Program([command, *arguments], folder, lambda: _run_file(command))
    raise LookupError(f"{command!r} is neither a command that a package in this environment installs nor a file")


def switch_on(strict: bool, precision: Precision, kv_bits: int | None, **kv: int) -> None:
    """Enables the patch. Prints a line on stderr now and one at exit. Raises what enable() and backends() raise."""
    found = joined(versions() | flashattn_core.backends())
    enable(strict=strict, precision=precision, kv_bits=kv_bits, **kv)
    how = "on" + ", strict" * strict + ", precision float32" * (precision == "float32")
    how += f", KV caches of {kv_bits} bits" if kv_bits else ""
    say(f"flash attention {how}: {found}", sys.stderr)
    # At exit, Python first prints a traceback and waits for the program's threads, and then calls _say_what_ran().
    atexit.register(_say_what_ran, sys.stderr, os.getpid())


def start(program: Program, strict: bool) -> None:
    """Runs the program. With `strict`, a program that succeeds without flash attention exits with status 1."""
    sys.argv[:] = program.argv
    _set_folder(program.folder)
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


def _module(name: str, arguments: Sequence[str]) -> Program:
    folder = os.getcwd()
    _set_folder(folder)  # find_spec() also looks there
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise LookupError(f"-m {name}: {error}") from error
    if spec is None:
        raise LookupError(f"-m {name}: no such module")
    argv = ["-m", *arguments]  # runpy replaces "-m" by the module's file, as python -m does
    return Program(argv, folder, lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _run_file(path: str) -> None:
    # runpy.run_path() would remove __main__ at the end of the file, although the program's threads may still run. It
    # would also leave __file__ relative. Python makes __file__ absolute, and leaves argv[0] as it is.
    main = ModuleType("__main__")
    main.__file__ = os.path.join(os.getcwd(), path)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), main.__file__, "exec", dont_inherit=True), vars(main))


def _set_folder(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _say_what_ran(stream: TextIO, process: int) -> None:
    if os.getpid() == process:  # not in a child that the program forked
        now = status()
        say(" · ".join([f"flash attention ran: {now.counts()}", *now.replaced()]), stream)
        if caches.wanted:
            from .caches.held import largest

            most = largest()
            held, unquantised = most.quantised / 1e6, most.in_16_bits / 1e6
            say(f"quantised KV caches held at most {held:,.2f} MB; in 16 bits: {unquantised:,.2f} MB", stream)
