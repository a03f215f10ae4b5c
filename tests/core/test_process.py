"""Tests imports without mlx or with another release of MLX, Python's modes, and the interpreter's exit.

At exit, calls of flash attention may be unevaluated, queued or running. They must not disturb the exit. A daemon
thread in mx.eval is not tested. It ends the process with SIGABRT even without flash attention.
"""

import os
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from flashattn_core import _ext, _releases

from tests.core.programs import ANOTHER_MLX, library, preloads, python
from tests.promises import promise

SUFFIX = EXTENSION_SUFFIXES[-1]  # .so


@promise("beside a release of MLX without a module the import raises at once, and names the cure")
@preloads
@pytest.mark.parametrize(
    "code",
    [
        "import flashattn_core",
        f"import mlx.core, sys; sys.path.insert(0, {str(Path(_ext.__file__).parent)!r}); import _ext",
    ],
    ids=["package", "module"],
)
def test_another_mlx_is_refused_before_anything_runs(tmp_path, code):
    """The extension module must refuse another release of MLX, even if it is imported without the package around it."""
    done = python(code, exit_code=1, LD_PRELOAD=library(tmp_path / "other.so", ANOTHER_MLX))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: flashattn_core was built for mlx {version('mlx')}, but found mlx 0.99.1.")
    assert f"pip install 'mlx[cpu]=={version('mlx')}'" in last


@pytest.fixture
def package(tmp_path):
    """A package with modules for several releases of MLX."""
    stable, this, other = f".abi3{SUFFIX}", EXTENSION_SUFFIXES[0], f".cpython-35-other{SUFFIX}"
    for release, suffix in (("0.9.1", this), ("0.32.10", stable), ("0.32.9", stable), ("0.40.0", other)):
        folder = tmp_path / f"_mlx_{release.replace('.', '_')}"
        folder.mkdir()
        (folder / f"_ext{suffix}").touch()
    return [tmp_path / "nothing", tmp_path]


@pytest.mark.parametrize("release", ["0.9.1", "0.32.10"])
def test_the_module_is_the_one_of_the_installed_mlx(package, release):
    assert _releases.module_folder(release, package).name == f"_mlx_{release.replace('.', '_')}"


def test_a_package_without_a_module_for_this_python_is_refused(tmp_path):
    with pytest.raises(ImportError, match=r"^flashattn_core has no extension module for CPython 3\.\d+: reinstall it"):
        _releases.module_folder("0.32.4", [tmp_path])
    assert re.fullmatch(r"reinstall flashattn-core with CPython 3\.\d+", _releases.install_command([tmp_path]))


@pytest.mark.parametrize("release", ["0.31.2", "0.32.11", "0.40.0", "0.32.9.dev20261127+abc"])
def test_a_release_without_a_module_for_this_python_is_refused(package, release):
    """One line must name the releases that have a module and the command that installs the newest of them."""
    mlx = "mlx[cpu]" if sys.platform == "linux" else "mlx"
    with pytest.raises(ImportError) as refused:
        _releases.module_folder(release, package)
    assert re.fullmatch(
        rf"flashattn_core was built for mlx 0\.9\.1, 0\.32\.9, 0\.32\.10, but found mlx {re.escape(release)}\. "
        rf"Install a matching mlx: pip install '{re.escape(mlx)}==0\.32\.10'.*",
        str(refused.value),
    )


@promise("the number of threads follows the affinity mask")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks are Linux's")
def test_threads_follow_the_affinity_mask():
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import flashattn_core
print(flashattn_core.backends()["cpu"])
"""
    assert python(code).stdout.strip().endswith(", 1 thread")


CALL = """
import mlx.core as mx, flashattn_core
x = mx.ones((1, 2, 3, 8))
print((flashattn_core.flash_attention(x, x, x, mask=flashattn_core.masks.Causal()) == 1).all().item())
try:
    flashattn_core.flash_attention(x, x, x[..., :2, :])
except ValueError:
    print("refused")
"""


@promise("the import works under python -I, -O, -X dev and with warnings as errors")
@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize(
    "flags", [["-I"], ["-O"], ["-OO"], ["-X", "dev"], ["-W", "error", "-bb"], ["-B", "-P"]], ids=str
)
def test_import_and_call(flags):
    """Import and call must work in each of Python's modes: isolated, without assertions or docstrings, and so on."""
    done = python(CALL, *flags)
    assert (done.stdout, done.stderr) == ("True\nrefused\n", "")


SET_UP = """
import sys, threading, mlx.core as mx, flashattn_core
x = mx.random.normal((1, 4, 1500, 64))
mx.eval(x)
def attend():
    return flashattn_core.flash_attention(x, x, x, mask="causal")
"""
ENDS = {
    "before the first call": "",
    "unevaluated": "out = attend()",
    "unevaluated, in a cycle that is never collected": "import gc; gc.disable(); a = [attend()]; a.append(a)",
    "with a gradient in the making": "grad = mx.grad(lambda q: flashattn_core.flash_attention(q, x, x).sum())(x)",
    "queued": "outs = [attend() for _ in range(5)]; mx.async_eval(outs)",
    "queued, and forgotten": "mx.async_eval(attend()); del x",
    "queued on several streams": """
outs = []
for _ in range(4):
    with mx.stream(mx.new_stream(mx.cpu)):
        outs.append(attend())
mx.async_eval(outs)
""",
    "at work in another thread": "threading.Thread(target=lambda: [mx.eval(attend()) for _ in range(5)]).start()",
    "with threads waiting awake": "mx.eval(attend())",
}


@promise("the interpreter ends with the program's exit code, whatever is at work")
@pytest.mark.rotate(5, default=3)
@pytest.mark.parametrize("state", ENDS)
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(7)", 7), ("raise KeyError('planned')", 1)], ids=str)
def test_exit_code_and_streams_are_the_program_s(state, end, code):
    done = python(SET_UP + ENDS[state] + f"\nprint('last line')\n{end}\n", exit_code=code, FLASHATTN_NUM_THREADS="3")
    assert done.stdout == "last line\n"
    assert done.stderr == "" if code != 1 else done.stderr.endswith("KeyError: 'planned'\n")


# Code that makes the import of mlx fail, as if the distribution mlx (or only the library libmlx) were missing.
LACKING = {
    "mlx": "import sys; sys.modules['mlx'] = None",
    "libmlx": """
import sys
class NoLibrary:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open shared object file: No such file or directory")
sys.meta_path.insert(0, NoLibrary())
""",
}


@promise("without an mlx that loads, the import says what to install")
@pytest.mark.parametrize("what", LACKING)
def test_the_import_says_what_to_install(what):
    done = python(LACKING[what] + "\nimport flashattn_core", exit_code=1)
    last = done.stderr.strip().splitlines()[-1]
    found = re.fullmatch(
        r"ImportError: flashattn_core needs mlx, which does not load: .+\. pip install '(.+)'(.*)", last
    )
    assert found, done.stderr
    if sys.platform == "linux":
        extras = [line.partition("extra == ")[2].strip("\"'") for line in requires("flashattn-core") if "mlx[" in line]
        assert found[1] == f"flashattn-core[{extras[0]}]"
        assert re.findall(r"\[(\w+)\]", found[2]) == extras[1:]
    else:
        assert found[1] in requires("flashattn-core")
