"""Helpers that build and run programs, and that find the instruction sets of this machine."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

NAMES = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "baseline": "baseline"}  # best first
ANOTHER_MLX = 'namespace mlx::core { const char* version() { return "0.99.1"; } }'  # text for library()
ARM = platform.machine() in ("arm64", "aarch64")
SETS = ["neon", "baseline"] if ARM else ["avx512", "avx2", "baseline"]
preloads = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD; run this test on Linux")


def sets_here() -> list[str]:
    """This machine's instruction sets, best first, as the operating system names them.

    Tests compare the extension's own list with this one, so this function must not ask the extension.
    """
    if ARM:
        return SETS
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    needs = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": {"avx2", "fma"}, "baseline": set()}
    return [name for name in SETS if needs[name] <= set(flags)]


def only(sets: Iterable[str]) -> str:
    """The CMake option that builds only these instruction sets."""
    return f"-DFLASHATTN_INSTRUCTION_SETS={';'.join(sets)}"


_unless_here = {
    name: pytest.mark.skipif(name not in sets_here(), reason=f"this machine has no {NAMES[name]}") for name in SETS
}
each_set = pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in _unless_here.items()])
_others = pytest.mark.nightly("sanitizers take a minute to compile it")
each_sanitized_set = pytest.mark.parametrize(
    "name", [sets_here()[0], *(pytest.param(name, marks=_others) for name in sets_here()[1:])]
)


def require(program: str, package: str) -> None:
    """Skips the test if a program is missing, and names the Debian package that contains the program."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is missing: apt-get install {package}")


def finished(
    *command: object, exit_code: int = 0, seconds: float | None = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program, which must end with `exit_code` within `seconds`. Returns its output."""
    done = subprocess.run(
        [*map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def run(*command: object, seconds: float | None = 300, **environment: str) -> str:
    """The output of a program that must succeed."""
    return finished(*command, seconds=seconds, **environment).stdout


def cmake(sources: Path, folder: Path, *options: str, target: str = "all") -> None:
    """Builds a CMake project, with the cmake and ninja that are installed beside this Python."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    run("cmake", "-S", sources, "-B", folder, "-G", "Ninja", *options, PATH=path)
    run("cmake", "--build", folder, "--target", target, seconds=None, PATH=path)


def library(file: Path, text: str) -> str:
    """Compiles C++ text to a shared library at this path. Returns the path."""
    source = file.with_suffix(".cpp")
    source.write_text(text)
    run("c++", "-std=c++20", "-shared", "-fPIC", source, "-o", file)
    return str(file)


def python(code: str, *flags: str, exit_code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a fresh process, which can import the tests' helpers."""
    before = environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join([before, str(Path(__file__).parents[2])])
    command = [sys.executable, *flags, "-c", code]
    return finished(*command, exit_code=exit_code, seconds=120, PYTHONPATH=path, **environment)
