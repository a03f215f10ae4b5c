"""The CPU backend passes the compiler's sanitizers for memory, undefined behaviour and races between threads. The
extension, loaded in Python, passes the sanitizer for memory.

A report or a wrong result ends the program with an error. Without --all, only the memory sanitizer runs, and only for
this machine's best instruction set, because everything else takes minutes to compile.
"""

import functools
import os
import shutil
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import flashattn_core
import pytest

from tests.builds import contents
from tests.core.programs import each_sanitized_set, finished, only, preloads, run, sets_here
from tests.promises import promise

pytestmark = pytest.mark.slow("compiles programs")

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "packages/flashattn-core"


@pytest.fixture(
    scope="module", params=["memory", pytest.param("races", marks=pytest.mark.nightly("minutes to compile"))]
)
def sanitized_drivers(build, everything, request):
    sanitizer = "thread" if request.param == "races" else "address,undefined" if everything else "address"
    optimised = "-O1" if everything else "-O0"  # -O1 runs three times faster, but compiles three times slower
    flags = f"{optimised} -g1 -fsanitize={sanitizer} -fno-sanitize-recover=all"
    sets = only(sets_here() if everything else sets_here()[:1])
    return build(HERE / "driver", f"-DCMAKE_CXX_FLAGS={flags}", sets, build_type="Debug", target="under_sanitizers")


@promise("sanitizers find no bad access, undefined behaviour or race")
@each_sanitized_set
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_report(sanitized_drivers, everything, direction, name):
    cases = 200 if everything else 60  # from case 51 on, some decode steps split the keys
    results = set()
    for threads in ("1", "2", "4", "7") if everything else ("4",):
        environment = {"FLASHATTN_CPU_ISA": name, "FLASHATTN_NUM_THREADS": threads}
        results.add(run(sanitized_drivers / "passes", direction, cases, **environment).split(": ", 1)[1])
    assert len(results) == 1
    assert results.pop().startswith(f"{cases} cases, ")


def test_no_report_of_the_pool(sanitized_drivers):
    # The test forks, and the child creates threads. By default, ThreadSanitizer ends such a child.
    run(sanitized_drivers / "pool", FLASHATTN_NUM_THREADS="4", TSAN_OPTIONS="die_after_fork=0")


@pytest.fixture(scope="module")
def sanitized_python(build, tmp_path_factory):
    """Returns a function that runs Python with a flashattn_core that is built with the memory sanitizer."""
    built = build(
        PACKAGE,
        "-DCMAKE_CXX_FLAGS=-O1 -g1 -fsanitize=address",
        only(sets_here()),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DSKBUILD_PROJECT_VERSION={flashattn_core.__version__}",
        build_type="Debug",
        made_of=contents(PACKAGE / "csrc") + f"{sys.version} {version('mlx')} {version('nanobind')}".encode(),
    )
    package = tmp_path_factory.mktemp("package") / "flashattn_core"
    shutil.copytree(PACKAGE / "src/flashattn_core", package)
    module_folder = package / f"_mlx_{version('mlx').replace('.', '_')}"
    module_folder.mkdir()
    for library in built.glob("*.so"):
        shutil.copy(library, package if library.name.startswith("lib") else module_folder)

    # libstdc++ is preloaded, too, because AddressSanitizer looks up __cxa_throw when the process starts.
    # Leaks are not detected, because Python and MLX do not free everything at exit.
    preload = " ".join(run("c++", f"-print-file-name={name}").strip() for name in ("libasan.so", "libstdc++.so.6"))

    # -S keeps Python from importing the extension's editable install.
    return functools.partial(
        finished,
        sys.executable,
        "-S",
        seconds=1200,
        PYTHONPATH=os.pathsep.join([str(package.parent), sysconfig.get_path("platlib")]),
        LD_PRELOAD=preload,
        ASAN_OPTIONS="detect_leaks=0",
    )


@pytest.mark.nightly("minutes to compile")
@preloads
@pytest.mark.parametrize("feature", ["gradients", "quantised", "transforms", "rows_that_see_nothing", "errors"])
def test_the_extension(sanitized_python, feature):
    """The tests in test_{feature}.py must pass under the memory sanitizer.

    Together these files cover the whole interface of the extension.
    """
    tests = HERE / f"test_{feature}.py"
    sanitized_python("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-k", "not environment")
