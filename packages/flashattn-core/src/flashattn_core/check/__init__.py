"""Whether a GPU's kernel may be used on this machine. The C++ op asks at the first call that needs a program.

A program that we have not tested ourselves is used only after `compare.py` found that it computes the same as the CPU.
The result is kept in the user's cache folder, for the next process.

FLASHATTN_CHECK: check "once" on this machine (default), or "never".
"""

import json
import os
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files

import mlx.core as mx

from .. import _ext
from . import compare


class KernelWarning(UserWarning):
    """A kernel failed its check on this machine and is not used. The text names the kernel and the error."""


def wrong_with(call: _ext.Call, variant: _ext.Variant, stream: mx.Stream) -> str:
    """Checks a kernel for calls like this one, unless all its programs have passed before. Returns the error, or "".

    If it fails, it also warns. Raises NoKernelError if there is too little memory for the check. The next call then
    checks again.
    """
    device = stream.device
    is_cuda = _ext.backend_of(device) == "cuda"
    untested = [] if when_to_check() == "never" else untested_programs(call, variant, device)
    if not untested:
        if is_cuda:
            compile_soon(call, variant, device)
        return ""
    try:
        if is_cuda:
            _ext.compile(call, variant, device, True)
        wrong = compare.of_call(call, variant, stream)
    except _ext.NoKernelError as error:  # a program does not compile
        wrong = str(error).removeprefix("[flash_attention] ")
    except MemoryError as error:
        raise _ext.NoKernelError(f"[flash_attention] {error}") from error
    if not wrong:
        for program in untested:
            _ext.keep("checked", program, "passed")
        return ""
    where = f"{mx.device_info(device)['device_name']}, mlx {mx.__version__}"  # type: ignore[attr-defined]
    wrong = f"{variant.kernel.name} fails its check on {where}: {wrong}"
    if report := _ext.keep("failed", wrong, ""):
        wrong += f". Please send us the file {report}"
    warnings.warn(wrong, KernelWarning, stacklevel=2)
    return wrong


def when_to_check() -> str:
    """The value of FLASHATTN_CHECK. Raises ValueError if it is invalid."""
    wanted = os.environ.get("FLASHATTN_CHECK", "once")
    if wanted not in ("once", "never"):
        raise ValueError(f"[flash_attention] FLASHATTN_CHECK is {wanted!r}, expected 'once' or 'never'")
    return wanted


def untested_programs(call: _ext.Call, variant: _ext.Variant, device: mx.Device) -> Sequence[str]:
    """The programs that neither we have tested nor this machine has checked, each as a text for the cache folder."""
    software = _ext.software(device)
    programs = _ext.programs(call, variant, _ext.device_of(device))
    unknown = [line for line in programs if line.split()[-1] not in _tested().get(compiler_of(software), ())]
    texts = [f"{software}\n{line}\n" for line in unknown]
    return [text for text in texts if _ext.read_kept("checked", text) != "passed"]


def compiler_of(software: str) -> str:
    """The part of _ext.software() on which a program's machine code depends: "sm_90a, NVRTC 13.0"."""
    return ", ".join(part for part in software.split(", ") if part.startswith(("sm_", "NVRTC ")))


@cache
def _tested() -> dict[str, frozenset[str]]:
    """For each architecture and compiler, the checksums of the program texts that have passed their check with us."""
    tested = json.loads(files(__package__).joinpath("tested.json").read_text())
    return {compiler: frozenset(sums) for compiler, sums in tested.items()}


def compile_soon(call: _ext.Call, variant: _ext.Variant, device: mx.Device) -> None:
    """Compiles the programs of this call, and of those that usually follow it, in other threads while MLX computes.

    MLX waits for a program when it needs it, and raises the compiler's error there.
    """
    wanted: list[tuple[_ext.Call, _ext.Variant | None]] = [(call, variant)]
    if "backward" not in variant.kernel.name and call.query_len > _ext.max_exact_queries("cuda"):
        wanted += [(each, None) for each in call.usual_next()]
    for part in filter(None, (wanted[:1], wanted[1:2], wanted[2:])):  # what is needed first has threads of its own
        threading.Thread(target=_compile, args=(part, device)).start()


def _compile(wanted: Sequence[tuple[_ext.Call, _ext.Variant | None]], device: mx.Device) -> None:
    for call, variant in wanted:
        if not threading.main_thread().is_alive():  # the program ends and would wait for this thread
            return
        with suppress(_ext.NoKernelError):  # the call itself raises the error
            _ext.compile(call, variant or _ext.choose(call, _ext.device_of(device)).variant, device, False)
