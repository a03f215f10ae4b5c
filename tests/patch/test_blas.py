"""--blas restarts the program once, so that MLX calls another BLAS library. If that fails, one line says why.

Most tests use a fake OpenBLAS, a library with the same function names.
"""

import atexit
import json
import os
import sys

import mlx.core as mx
import pytest
from mlxlm_flash_patch import blas, cli
from mlxlm_flash_patch import run as running

from tests.core import programs
from tests.promises import promise

pytestmark = pytest.mark.slow("processes that import for seconds")

OWN = "[mlxlm-flash] "
WHO_AM_I = """
import json, os, sys
from mlxlm_flash_patch import blas
print(json.dumps({
    "argv": sys.argv[1:], "utf8": sys.flags.utf8_mode, "blas": blas.blas(),
    "preloaded": os.environ.get("LD_PRELOAD"), "left": os.environ.get(blas.STARTED_AGAIN),
}))
"""


@pytest.fixture(autouse=True)
def nothing_preloaded(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """library(path, config, threads, cblas): makes a fake OpenBLAS and returns its path."""

    def make(path="libopenblas.so.0", config="OpenBLAS 0.3", threads=1, cblas="cblas_sgemm"):
        file = tmp_path_factory.mktemp("lib") / path
        file.parent.mkdir(exist_ok=True)
        text = f'extern "C" {{ void {cblas}() {{}} int openblas_get_parallel() {{ return {threads}; }}'
        text += f' const char* openblas_get_config() {{ return "{config}"; }} }}'
        return programs.library(file, text)

    return make


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(WHO_AM_I)
    return file


def refused(choice):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        blas.preload(str(choice))
    return str(error.value)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", "reference"),
        ("/usr/lib/x86_64-linux-gnu/blas/libblas.so.3.11.0", "reference"),
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3", "openblas"),
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so", "openblas"),
        ("/opt/intel/libmkl_rt.so.2", "mkl"),
        ("/usr/lib/x86_64-linux-gnu/blis-openmp/libblis.so.4", "blis"),
        ("/opt/arm/lib/libarmpl_lp64_mp.so", "armpl_lp64_mp"),
        ("/home/openblas/venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", "reference"),
    ],
)
def test_its_name(file, name):
    assert blas.name_of(file) == name


@programs.preloads
def test_it_is_the_one_that_mlx_calls(command, library):
    """MLX calls a preloaded library only if the library defines cblas_sgemm."""
    code = "from mlxlm_flash_patch.blas import *; print(blas())"
    for preloaded, name in ((library(), "openblas"), (library(cblas="scipy_cblas_sgemm"), "reference")):
        done = command("python", "-c", code, env={"LD_PRELOAD": preloaded})
        assert (done.stdout, done.stderr) == (f"{name}\n", "")


@programs.preloads
def test_none_on_a_gpu(monkeypatch):
    assert blas.blas()
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert blas.blas() is None


@promise("--blas restarts the program once, with the library")
@programs.preloads
@pytest.mark.parametrize(
    "start",
    [
        ["mlxlm-flash", "run", "--blas", "LIBRARY", "script.py"],
        ["mlxlm-flash", "run", "--precision", "input", "--blas=LIBRARY", "-m", "script"],
        ["python", "-X", "utf8", "-m", "command", "run", "--blas", "LIBRARY", "script.py"],
        ["python", "-X", "utf8", "command.py", "run", "--blas", "LIBRARY", "--precision", "float32", "script.py"],
    ],
    ids=" ".join,
)
def test_the_program_starts_again(command, light, library, script, start):
    """The program keeps its interpreter and arguments. Other libraries stay in LD_PRELOAD, behind the new one."""
    (script.parent / "command.py").write_text("from mlxlm_flash_patch.cli import main\nmain()\n")
    new, before = library(), library("libbefore.so", cblas="unknown")
    name, *arguments = (word.replace("LIBRARY", new) for word in start)
    done = command(
        name, *arguments, "-x", "two words", "--blas", "its", cwd=script.parent, env={**light, "LD_PRELOAD": before}
    )
    assert json.loads(done.stdout) == {
        "argv": ["-x", "two words", "--blas", "its"],
        "utf8": int("utf8" in start),
        "blas": "openblas",
        "preloaded": f"{new}:{before}",
        "left": None,
    }, done.stderr
    assert [line.startswith(f"{OWN}flash attention") for line in done.stderr.splitlines()] == [True, True]


@programs.preloads
def test_once(monkeypatch, library):
    """preload() raises an error if MLX does not call the library after a restart. Child processes may restart, too."""
    starts = []
    monkeypatch.setattr(os, "execve", lambda *arguments: starts.append(arguments))
    file = library()
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    blas.preload(file)
    [(program, arguments, environment)] = starts
    assert (program, arguments) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])
    assert environment["LD_PRELOAD"] == f"{file}:libother.so"
    assert {**os.environ, **environment} == environment

    monkeypatch.setenv(blas.STARTED_AGAIN, environment[blas.STARTED_AGAIN])
    assert refused(file).startswith(f"--blas {file} is preloaded, but MLX still calls ")
    assert len(starts) == 1
    assert blas.STARTED_AGAIN not in os.environ
    monkeypatch.setenv(blas.STARTED_AGAIN, "1")  # the parent's process id, which a child process inherits
    blas.preload(file)
    assert len(starts) == 2


@programs.preloads
def test_what_mlx_calls_already_is_left(monkeypatch, library):
    """preload() does not restart the program if MLX calls the library already. For `auto`, any fast BLAS suffices."""
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started again"))
    file = library()
    monkeypatch.setattr(blas, "_called", lambda: file)
    blas.preload("auto")
    blas.preload(file)


@programs.preloads
def test_a_reference_blas_is_refused(command, light, script):
    """Here --blas names the reference BLAS that MLX calls already."""
    done = command("mlxlm-flash", "run", "--blas", blas._called(), script, env=light)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line == f"Error: --blas {blas._called()} is the slow reference BLAS itself"


@programs.preloads
def test_no_library(tmp_path):
    text = tmp_path / "libopenblas.so"
    text.write_text("INPUT(libopenblas.so.0)")
    assert refused(text) == f"--blas {text} does not load: file too short"
    for choice in ("", "Auto", tmp_path, tmp_path / "no"):
        assert refused(choice) == f"--blas takes auto or the file of a library, not {str(choice)!r}"


@promise("a BLAS library that MLX cannot call is an error")
@programs.preloads
def test_a_library_that_mlx_cannot_call(library):
    plain, long = library(cblas="scipy_cblas_sgemm"), library(config="OpenBLAS 0.3 USE64BITINT")
    assert refused(plain) == f"--blas {plain} has no cblas_sgemm, which MLX calls"
    assert refused(long) == f"--blas {long} takes integers of 64 bits, but MLX passes 32 bits"
    spaced = library("a folder/libopenblas.so.0")
    assert refused(spaced) == f"--blas {spaced}: LD_PRELOAD takes no path with a space or a colon"


@programs.preloads
def test_auto_takes_the_first_with_threads(monkeypatch, library):
    good = library()
    others = ["/no/libopenblas.so.0", library(cblas="scipy_cblas_sgemm"), library(threads=0), "libm.so.6"]
    monkeypatch.setattr(blas, "_known", lambda: iter([*others, good, library()]))
    assert blas.openblas() == good
    monkeypatch.setattr(blas, "_known", lambda: iter(others))
    assert blas.openblas() is None
    assert refused("auto") == f"--blas auto finds no OpenBLAS with threads on this machine: {blas.INSTALL}"


def test_another_mlx(monkeypatch):
    says = "--blas works only with MLX's CPU build on Linux"
    with monkeypatch.context() as macos:
        macos.setattr(sys, "platform", "darwin")
        assert refused("auto") == says
    monkeypatch.setattr(blas, "_called", lambda: None)  # as on macOS, where MLX calls Accelerate
    assert refused("auto") == says


@pytest.mark.parametrize(("name", "said"), [("reference", 1), ("openblas", 0), (None, 0)])
@pytest.mark.parametrize("mode", ["0", "1"])
def test_run_says_what_bounds(monkeypatch, capsys, script, name, said, mode):
    """If MLX uses the reference BLAS, mlxlm-flash run says so in one line before the program begins."""
    monkeypatch.setattr(blas, "blas", lambda: name)
    monkeypatch.setattr(running, "start", lambda *_: print("begins", file=sys.stderr))
    monkeypatch.setattr(sys, "argv", ["mlxlm-flash", "run", str(script)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MLXLM_FLASH", mode)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [f"{OWN}{blas.REFERENCE}"] * said + ["begins"]
