"""Finds clang, and compiles programs with it. tests/builds.py caches the programs."""

from __future__ import annotations

import hashlib
import pickle
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tests.builds import built, contents

from .errors import CompileError
from .translate import Translation, translate

HERE = Path(__file__).parent

# Kernels include these headers. They are empty here, because shim/shim.h comes before the preprocessed text.
METAL_HEADERS = """atomic common compute geometric integer limits logging math matrix numeric pack relational simdgroup
    simdgroup_matrix stdlib types type_traits uniform"""
DEFINES = ("-D__METAL__=1", "-D__METAL_VERSION__=320", "-D__METAL_MACOS__=1")

WARNINGS = [
    # Clang does not know Metal's attributes and pragmas. The shim turns `const constant` into `const const`.
    "-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Wno-unknown-pragmas", "-Wno-duplicate-decl-specifier",
    "-Wno-user-defined-literals", "-Wno-reserved-user-defined-literal", "-Wno-pass-failed",
    "-Wno-undefined-internal",  # a source may instantiate only a part of a kernel
]  # fmt: skip

DEVICE_FLAGS = [
    "-std=c++17", "-O2", "-g1", "-march=x86-64-v3", "-fno-pie", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
    "-fno-strict-aliasing", "-ffp-contract=on",
    "-fstack-clash-protection",  # a stack overflow always touches the guard, even with a very large frame
    # A result in half or bfloat is rounded after each operation, as on the GPU.
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    # A kernel's reference argument may have no buffer. Without this flag, clang may read through the reference before
    # the condition that guards the read.
    "-fno-delete-null-pointer-checks",
    # Clang must not merge accesses, because they are checked and counted, and hooks.cpp takes at most 16 bytes.
    "-fno-vectorize", "-fno-slp-vectorize",
    "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0",
    "-mllvm", "-tsan-instrument-atomics=0", "-mllvm", "-tsan-instrument-read-before-write=1",
]  # fmt: skip
RUNTIME_FLAGS = ["-std=c++20", "-O2", "-g1", "-march=x86-64-v3", "-fno-pie", "-Wall", "-Wextra"]
LINK_FLAGS = ["-no-pie", "-fuse-ld=lld", "-rtlib=compiler-rt", "-unwindlib=libgcc", "-lm"]


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@cache
def compiler() -> str | None:
    """The path of clang++ in version 19 or later. None if there is none."""
    for name in ("clang++-19", "clang++-20", "clang++-21", "clang++"):
        if path := shutil.which(name):
            version = re.search(r"clang version (\d+)", _output([path, "--version"]))
            if version and int(version[1]) >= 19:
                return path
    return None


def _missing() -> str | None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "this needs Linux on x86-64"  # threads.cpp has x86-64 assembly
    return None if compiler() else "clang++-19 is missing: apt-get install clang-19 libclang-rt-19-dev lld-19"


MISSING = _missing()
"""Why this machine cannot compile, or None."""


@cache
def harness(*further: Path) -> str:
    """A hash of the compiler, the shim and the runtime. It is part of every cache key.

    further: for CUDA, the folder with CUDA's shim and runtime. They are hashed, too.
    """
    own = contents(HERE, *further, patterns=["shim/*", "runtime/*", "toolchain.py", "translate.py"])
    libraries = " ".join(platform.libc_ver())  # kernels call libc's functions
    digest = hashlib.sha256(own + _output([str(compiler()), "--version"]).encode() + libraries.encode())
    return digest.hexdigest()


def clang(arguments: Sequence[str | Path], text: str = "") -> subprocess.CompletedProcess[str]:
    if MISSING:
        raise CompileError(MISSING)
    return subprocess.run([str(compiler()), *arguments], input=text, capture_output=True, text=True, check=False)


def _compile(arguments: Sequence[str | Path], text: str = "") -> str:
    done = clang(arguments, text)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stdout


def preprocess(source: str, include_dirs: Sequence[Path] = (), defines: Sequence[str] = DEFINES) -> str:
    """Returns the preprocessed source, without the shim."""
    include = [flag for path in (_metal_headers(), *include_dirs) for flag in ("-I", str(path))]
    flags = ["-E", "-x", "c++", "-std=c++17", "-nostdinc", *defines, *include, "-"]
    return _compile(flags, f'#line 1 "kernels.metal"\n{source}\n')


@cache
def _metal_headers() -> Path:
    """A folder of empty headers."""

    def make(folder: Path) -> None:
        for header in METAL_HEADERS.split():
            (folder / f"metal_{header}").touch()

    return built(make, "metal headers", METAL_HEADERS)


@cache
def headers_in(folders: Sequence[Path]) -> bytes:
    """The text of all headers that a source may include from these folders."""
    return contents(*folders, patterns=["**/*.h"])


def build(source: str, include_dirs: tuple[Path, ...]) -> Path:
    return program(lambda: translate(preprocess(source, include_dirs)), (), source, headers_in(include_dirs))


def program(translated: Callable[[], Translation], language: tuple[Path, ...], *key: str | bytes) -> Path:
    """Returns a folder with an executable `program` (see runtime/main.cpp) and a pickled `translation`.

    language: empty for Metal. For CUDA, the folder with its shim and its additions to the runtime.
    """

    def make(folder: Path) -> None:
        translation = translated()
        (folder / "translation").write_bytes(pickle.dumps((translation.kernels, translation.constants)))
        text, kernels = folder / "kernels.cpp", folder / "kernels.o"
        text.write_text(f'#include "shim.h"\n{translation.text}')
        _compile(
            [
                *DEVICE_FLAGS,
                *WARNINGS,
                "-I",
                (*language, HERE)[0] / "shim",
                "-I",
                HERE / "runtime",
                "-c",
                text,
                "-o",
                kernels,
            ]
        )
        objects = sorted(_runtime(*language).glob("*.o"))
        _compile([*LINK_FLAGS[:1], kernels, *objects, *LINK_FLAGS[1:], "-o", folder / "program"])
        kernels.unlink()

    return built(make, "program", harness(*language), *key)


def _runtime(*language: Path) -> Path:
    def make(folder: Path) -> None:
        for place in (HERE, *language):
            for source in sorted((place / "runtime").glob("*.cpp")):
                _compile([*RUNTIME_FLAGS, "-I", HERE / "runtime", "-c", source, "-o", folder / f"{source.stem}.o"])

    return built(make, "runtime", harness(*language))


@cache
def symbolizer() -> list[str] | None:
    for name in ("llvm-symbolizer-19", "llvm-symbolizer"):
        if path := shutil.which(name):
            return [path, "--output-style=GNU", "--inlining", "--functions=none", "--obj"]
    path = shutil.which("addr2line")
    return [path, "--inlines", "--exe"] if path else None


def source_line(program: Path, address: str) -> str:
    """Finds the source line for an address in a compiled kernel. Returns the address itself if there is none.

    For an address in the shim, returns the line of the kernel that called the shim's function.
    """
    command = symbolizer()
    if command is None:
        return f"{address} of {program} (for its line: apt-get install llvm-19)"
    frames = _output([*command[:-1], f"{command[-1]}={program}", address]).split("\n")
    frames = [
        re.sub(r" \(discriminator.*", "", frame)
        for frame in frames
        if frame and "_on_cpu/" not in frame and "registrations:" not in frame
    ]
    if not frames or frames[0].startswith("??"):
        return address
    return " called from ".join(Path(frame).name if frame.startswith("/") else frame for frame in frames[:2])
