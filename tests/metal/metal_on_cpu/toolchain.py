"""Finds clang, and compiles with a cache: a folder for each hash of everything that goes into a program."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from .errors import CompileError

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashattn-metal-on-cpu"

# Kernels include these; what they declare is in shim/, which is put before the preprocessed text.
METAL_HEADERS = [
    "atomic",
    "common",
    "compute",
    "geometric",
    "integer",
    "limits",
    "logging",
    "math",
    "matrix",
    "numeric",
    "pack",
    "relational",
    "simdgroup",
    "simdgroup_matrix",
    "stdlib",
    "types",
    "type_traits",
    "uniform",
]
DEFINES = ("__METAL__=1", "__METAL_VERSION__=320", "__METAL_MACOS__=1")

WARNINGS = [
    # Metal's own attributes and pragmas, and what a const in front of `constant` looks like when that is const, too.
    "-Wno-unknown-attributes",
    "-Wno-ignored-attributes",
    "-Wno-unknown-pragmas",
    "-Wno-duplicate-decl-specifier",
    "-Wno-user-defined-literals",
    "-Wno-reserved-user-defined-literal",
    "-Wno-pass-failed",
    # A kernel that is only instantiated in part.
    "-Wno-undefined-internal",
]

DEVICE_FLAGS = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-march=x86-64-v3",
    "-fno-pie",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fstack-clash-protection",  # a frame of any size meets the guard below its fiber's stack
    "-ffp-contract=on",
    "-fno-strict-aliasing",
    # half and bfloat round after each operation, as on the GPU.
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    # A reference may be unbound: without this clang would read it before the condition that guards it.
    "-fno-delete-null-pointer-checks",
    # One access of the source is one access of the program, and none is wider than the hooks know (16 bytes).
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-atomics=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
]
RUNTIME_FLAGS = ["-std=c++20", "-O2", "-g1", "-march=x86-64-v3", "-fno-pie", "-Wall", "-Wextra"]
LINK_FLAGS = ["-no-pie", "-fuse-ld=lld", "-rtlib=compiler-rt", "-unwindlib=libgcc", "-lm"]


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@cache
def compiler() -> str | None:
    """clang++ of version 19 or later."""
    for name in ("clang++-19", "clang++-20", "clang++-21", "clang++"):
        if path := shutil.which(name):
            version = re.search(r"clang version (\d+)", _output([path, "--version"]))
            if version and int(version[1]) >= 19:
                return path
    return None


def _missing() -> str | None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "this needs Linux on x86-64"  # the fibers' switch is written in its assembly
    return None if compiler() else "clang++-19 is missing: apt-get install clang-19 libclang-rt-19-dev lld-19"


MISSING = _missing()
"""Why nothing can be compiled here, or None."""


@cache
def _version() -> str:
    return _output([str(compiler()), "--version"])


@cache
def _sources(folder: str) -> bytes:
    return b"".join(path.name.encode() + path.read_bytes() for path in sorted((HERE / folder).iterdir()))


def clang(arguments: list[str | Path], text: str = "") -> subprocess.CompletedProcess[str]:
    if MISSING:
        raise CompileError(MISSING)
    return subprocess.run([str(compiler()), *arguments], input=text, capture_output=True, text=True, check=False)


def cached_folder(*parts: str | bytes) -> Path:
    """A folder that belongs to this content, this shim, this runtime and this compiler alone."""
    digest = hashlib.sha256()
    for part in (*parts, _version(), _sources("shim"), _sources("runtime")):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return CACHE / digest.hexdigest()[:32]


def preprocess(source: str, name: str, include_dirs: tuple[str, ...], defines: tuple[str, ...]) -> str:
    """The source with its includes and macros resolved; the shim is not part of it yet."""
    include = [flag for path in (_metal_headers(), *include_dirs) for flag in ("-I", str(path))]
    define = [f"-D{each}" for each in (*DEFINES, *defines)]
    done = clang(
        ["-E", "-x", "c++", "-std=c++17", "-nostdinc", *define, *include, "-"],
        f'#line 1 "{name}.metal"\n{source}\n',
    )
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stdout


@cache
def _metal_headers() -> Path:
    """A folder of empty headers; always the same one, because its name is in the preprocessed text, which is hashed."""
    folder = CACHE / "metal_headers"
    folder.mkdir(parents=True, exist_ok=True)
    for header in METAL_HEADERS:
        (folder / f"metal_{header}").touch()
    return folder


def build(translated: str, defines: tuple[str, ...]) -> Path:
    """The program of a translated source: an executable, see runtime/main.cpp."""
    define = [f"-D{each}" for each in defines]
    folder = cached_folder(translated, *DEVICE_FLAGS, *define, *LINK_FLAGS)
    program = folder / "program"
    if program.exists():
        return program
    with _new(folder) as new:
        (new / "kernels.cpp").write_text(f'#include "shim.h"\n{translated}')
        _run(
            [*DEVICE_FLAGS, *WARNINGS, *define, "-I", HERE / "shim", "-c", new / "kernels.cpp", "-o", new / "kernels.o"]
        )
        objects = sorted(_runtime().glob("*.o"))
        _run([*LINK_FLAGS[:1], new / "kernels.o", *objects, *LINK_FLAGS[1:], "-o", new / "program"])
        (new / "kernels.o").unlink()
    return program


def _runtime() -> Path:
    folder = cached_folder("runtime", *RUNTIME_FLAGS)
    if not folder.exists():
        with _new(folder) as new:
            for source in sorted((HERE / "runtime").glob("*.cpp")):
                _run([*RUNTIME_FLAGS, "-c", source, "-o", new / f"{source.stem}.o"])
    return folder


class _new:
    """A temporary folder that becomes `folder` when all went well: another process never sees half of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Path:
        CACHE.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(dir=CACHE, prefix="new-"))
        return self.temporary

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and not self.folder.exists():
            try:
                self.temporary.rename(self.folder)
            except OSError:  # another process was first
                if not self.folder.exists():
                    raise
        if self.temporary.exists():
            shutil.rmtree(self.temporary)


def _run(arguments: list[str | Path]) -> None:
    done = clang(arguments)
    if done.returncode:
        raise CompileError(done.stderr)


@cache
def _symbolizer() -> list[str] | None:
    for name in ("llvm-symbolizer-19", "llvm-symbolizer"):
        if path := shutil.which(name):
            return [path, "--output-style=GNU", "--inlining", "--functions=none", "--obj"]
    path = shutil.which("addr2line")
    return [path, "--inlines", "--exe"] if path else None


def source_line(program: Path, address: str) -> str:
    """The kernel's line at an address of its program, outside of the shim; the address if no tool is there to ask."""
    symbolizer = _symbolizer()
    if symbolizer is None:
        return f"{address} of {program} (for its line: apt-get install llvm-19)"
    frames = _output([*symbolizer[:-1], f"{symbolizer[-1]}={program}", address]).split("\n")
    frames = [
        re.sub(r" \(discriminator.*", "", frame)
        for frame in frames
        if frame and str(HERE) not in frame and "registrations:" not in frame
    ]
    if not frames or frames[0].startswith("??"):
        return address
    return " called from ".join(Path(frame).name if frame.startswith("/") else frame for frame in frames[:2])
