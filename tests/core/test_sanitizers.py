"""The CPU backend alone under the compiler's sanitizers: memory, undefined behaviour, races between threads. And the
extension, in Python, under the one for memory.

Each report ends the program with an error, and so do wrong results. `make sanitize` runs the long form.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import flashattn_core
import pytest
from test_instruction_sets import run, sets_here

LONG = int(os.environ.get("FLASHATTN_SANITIZED_CASES", "0"))  # cases; 0: the short form
AT_ONCE = 200  # by one run of a driver
SETS = sets_here() if LONG else sets_here()[:1]  # each takes the sanitizers a minute to compile
ONLY = f"-DFLASHATTN_INSTRUCTION_SETS={';'.join(SETS)}"
SANITIZERS = {"memory and undefined behaviour": "address,undefined", "races": "thread"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitized_drivers(build_drivers, request):
    flags = f"-O1 -g1 -fsanitize={SANITIZERS[request.param]} -fno-sanitize-recover=all"
    return build_drivers(f"-DCMAKE_CXX_FLAGS={flags}", ONLY, build_type="Debug", target="under_sanitizers")


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("program", ["forward", "backward"])
def test_no_report(sanitized_drivers, program, name):
    cases = LONG or 60  # the forward pass alone meets runs of keys in a decode step from case 51 on
    for first in range(0, cases, AT_ONCE):
        count, results = min(AT_ONCE, cases - first), set()
        for threads in ("1", "2", "4", "7") if LONG else ("1", "4"):
            environment = {"FLASHATTN_CPU_ISA": name, "FLASHATTN_NUM_THREADS": threads}
            results.add(run(sanitized_drivers / program, count, first, **environment).split(": ", 1)[1])
        assert len(results) == 1
        assert results.pop().startswith(f"{count} cases, ")


def test_no_report_of_the_contract(sanitized_drivers):
    assert run(sanitized_drivers / "contract").endswith(" expectations\n")


def test_no_report_of_the_pool(sanitized_drivers):
    # The forked child makes threads of its own, which the sanitizer for races would rather not see.
    run(sanitized_drivers / "pool", FLASHATTN_NUM_THREADS="4", TSAN_OPTIONS="die_after_fork=0")


def test_no_report_of_calls_that_are_cancelled(sanitized_drivers):
    run(sanitized_drivers / "cancellation", FLASHATTN_NUM_THREADS="2")


@pytest.fixture(scope="module")
def sanitized_extension(build_drivers, tmp_path_factory):
    """Runs a script in a Python whose flashattn_core is built with the sanitizer."""
    build = build_drivers(
        "-DCMAKE_CXX_FLAGS=-O1 -g1 -fsanitize=address",
        ONLY,
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DSKBUILD_PROJECT_VERSION={flashattn_core.__version__}",
        build_type="Debug",
        sources=ROOT / "packages/flashattn-core",
    )
    package = tmp_path_factory.mktemp("package") / "flashattn_core"
    shutil.copytree(ROOT / "packages/flashattn-core/src/flashattn_core", package)
    for module in build.glob("_ext*.so"):
        shutil.copy(module, package)

    def library(name: str) -> str:
        return subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout

    # libstdc++ before Python, too: the sanitizer looks for its throw at the start. Python and MLX leave at the end what
    # they have for as long as they live: leaks would be theirs.
    preload = " ".join(library(name).strip() for name in ("libasan.so", "libstdc++.so.6"))
    paths = os.pathsep.join([str(package.parent), sysconfig.get_path("platlib")])

    def run_script(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", *map(str, command)],  # -S: not the extension that is installed as editable
            env={**os.environ, "PYTHONPATH": paths, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run_script


needs_minutes = pytest.mark.skipif(
    sys.platform != "linux" or not (LONG or os.environ.get("CI")),
    reason="takes minutes to build, and Linux's way to put a library before Python: `make sanitize`, or with CI set",
)


@needs_minutes
def test_the_extension(sanitized_extension):
    done = sanitized_extension(Path(__file__).parent / "smoke.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["forward_and_gradient", "quantised", "transforms", "errors"]


@needs_minutes
def test_the_sanitizer_watches_the_arrays_of_mlx(sanitized_extension):
    done = sanitized_extension(Path(__file__).parent / "smoke.py", "overrun")
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
