"""mlxlm-flash hook: plain programs heed MLXLM_FLASH, and nothing else changes. In an environment of its own."""

import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
from arms import ATTEND, LATER

ROOT = Path(__file__).parents[2]
NAME = "mlxlm-flash.pth"
GENERATE = ("--prompt", "Attention is", "--ignore-chat-template", "--max-tokens", "12", "--verbose", "False")
IMPORT = "import mlx_lm.models.base"
FIRST = r"\[mlxlm-flash\] flash attention on(, strict)?(, precision float32)?: mlx .* · mlx-lm .* · cpu .*"
LAST = r"\[mlxlm-flash\] flash attention ran: cpu_prefill \d+(, cpu_decode \d+)? · fallbacks: none"


class Environment:
    """A virtual environment with mlx-lm and this package as a wheel; what they need is found in the tests' own."""

    def __init__(self, folder, light):
        self.folder, self.light = folder, light
        self.uv("venv", "--python", sys.executable, folder)
        wanted = ("--no-deps", f"mlx-lm=={version('mlx-lm')}", ROOT / "packages" / "mlxlm-flash-patch")
        try:
            self.uv("pip", "install", "--offline", *wanted)
        except subprocess.CalledProcessError:  # uv's cache does not hold what `uv run pytest` was set up from
            self.uv("pip", "install", *wanted)
        [self.site_packages] = folder.glob("lib/python*/site-packages")
        ours = Path(sysconfig.get_path("purelib"))
        # The tests' own environment may hold flashattn_core as an editable install, which is an import.
        editable = "\n".join(f"import {file.stem}" for file in ours.glob("_editable_skbc_*.py"))
        (self.site_packages / "tests.pth").write_text(f"{ours}\n{editable}\n")

    def uv(self, *arguments):
        env = {**os.environ, "VIRTUAL_ENV": str(self.folder)}
        program = os.environ.get("UV") or shutil.which("uv")
        subprocess.run([program, *arguments], env=env, check=True, capture_output=True, cwd=ROOT)

    def files(self):
        return {str(file) for file in self.site_packages.rglob("*") if "__pycache__" not in file.parts}

    def env(self, flash=None, **more):
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VIRTUAL_ENV": None, "MLXLM_FLASH": flash, **more}
        return {name: value for name, value in env.items() if value is not None}

    def run(self, name, *arguments, flash=None, env=None, **options):
        """A program as it is installed."""
        command = [self.folder / "bin" / name, *arguments]
        options = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run(command, env=self.env(flash, **(env or {})), **options)

    def python(self, *arguments, env=None, **options):
        """A Python program that imports models of mlx-lm and nothing else of it."""
        return self.run("python", *arguments, env={**self.light, **(env or {})}, **options)


@pytest.fixture(scope="module")
def bare(tmp_path_factory, light):
    return Environment(tmp_path_factory.mktemp("bare") / "environment", light)


@pytest.fixture
def hooked(bare):
    """With the hook installed, and taken out afterwards."""
    assert bare.run("mlxlm-flash", "hook", "install").returncode == 0
    yield bare
    assert bare.run("mlxlm-flash", "hook", "remove").returncode == 0


def test_one_file_comes_and_goes(bare):
    def said(*arguments, flash=None):
        done = bare.run("mlxlm-flash", "hook", *arguments, flash=flash)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    before, path = bare.files(), bare.site_packages / NAME
    where = f"environment: {bare.folder}, Python {sys.version.split()[0]}"
    assert said("status") == [f"{path}: not installed", where, "MLXLM_FLASH: not set"]
    for _ in range(2):  # again is no error
        assert said("install")[0] == f"wrote {path}"
        assert bare.files() - before == {str(path)}
    assert said("status", flash="strict") == [f"{path}: installed", where, "MLXLM_FLASH: strict"]
    path.write_text("import os\n")
    assert said("status")[0] == f"{path}: installed by another version of mlxlm-flash-patch"
    assert said("remove") == [f"deleted {path}"]
    assert bare.files() == before
    assert said("remove") == ["there was none"]


def test_a_full_disk_leaves_nothing_half_written(bare):
    before = bare.files()
    done = bare.run(
        "mlxlm-flash", "hook", "install", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    )
    assert done.returncode == 1
    assert done.stderr == "Error: nothing is installed: [Errno 27] File too large\n"
    assert bare.files() == before


def test_where_python_reads_no_start_up_files(bare, tmp_path):
    """As after `pip install --target`: a file there would be without effect."""
    for found in bare.site_packages.glob("mlxlm_flash*"):
        (shutil.copytree if found.is_dir() else shutil.copy)(found, tmp_path / found.name)
    before = set(tmp_path.rglob("*"))
    done = bare.run("mlxlm-flash", "hook", "install", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: nothing is installed: {tmp_path} holds mlxlm-flash-patch, and is no site-")
    assert not [path for path in set(tmp_path.rglob("*")) - before if path.suffix == ".pth"]


def modules(environment, flash):
    done = environment.python("-X", "importtime", "-c", "pass", flash=flash)
    assert done.returncode == 0
    return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("flash", [None, "0", "1", "strict", "float32", "float32,strict"])
def test_without_the_variable_it_costs_no_import(bare, flash):
    """With it, other programs, such as pip, import one small module and a built-in one, and hear nothing."""
    plain, is_asked = modules(bare, flash), flash not in (None, "0")
    bare.run("mlxlm-flash", "hook", "install")
    try:
        assert modules(bare, flash) - plain == ({"atexit", "mlxlm_flash_startup"} if is_asked else set())
        done = bare.python("-c", "import sys; print('Watch' in str(sys.meta_path))", flash=flash)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{is_asked}\n", "")
    finally:
        bare.run("mlxlm-flash", "hook", "remove")


@pytest.mark.rotate(6)
@pytest.mark.parametrize("flash", ["strict", "1", "float32", "float32,strict", "0", None])
def test_plain_generate(hooked, model_folder, command, flash):
    done = hooked.run("mlx_lm.generate", "--model", model_folder, *GENERATE, flash=flash)
    expected = command("mlx_lm.generate", "--model", model_folder, *GENERATE)
    assert (done.returncode, done.stdout) == (0, expected.stdout)
    if flash in (None, "0"):
        assert done.stderr == ""
    else:
        first, last = done.stderr.splitlines()
        strict, float32 = (
            (", strict" if "strict" in flash else None),
            (", precision float32" if "32" in flash else None),
        )
        assert re.fullmatch(FIRST, first).groups() == (strict, float32)
        assert re.fullmatch(LAST, last)


@pytest.mark.parametrize(
    "program",
    [
        ["script.py"],
        ["-m", "script"],
        ["-c", ATTEND],
        pytest.param(["-I", "script.py"], marks=pytest.mark.rotate(2)),  # these import all of mlx-lm
        pytest.param(["-E", "-"], marks=pytest.mark.rotate(2)),
    ],
)
def test_any_program(hooked, tmp_path, program):
    (tmp_path / "script.py").write_text(ATTEND)
    done = hooked.python(*program, flash="1", cwd=tmp_path, input=ATTEND)
    assert done.returncode == 0
    first, last = done.stderr.splitlines()
    assert re.fullmatch(FIRST, first)
    assert re.fullmatch(LAST, last)


@pytest.mark.parametrize("value", ["", "2", "yes", "STRICT", "strict\n", "faster", "strict,float32"])
def test_a_value_that_means_nothing(hooked, value):
    done = hooked.python("-c", "import sys; print('Watch' in str(sys.meta_path))", flash=value)
    assert (done.returncode, done.stdout) == (0, "False\n")
    modes = "0, 1, strict, float32, float32,strict"
    expected = f"[mlxlm-flash] MLXLM_FLASH is {value!r}, expected one of {modes}: flash attention stays off\n"
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("code", "returncode", "never_ran"),
    [
        ("import json", 0, False),  # nothing of mlx-lm
        (IMPORT, 1, True),
        (f"{IMPORT}, sys; sys.exit(0)", 1, True),
        (f"{IMPORT}; raise KeyError", 1, True),
        (ATTEND, 0, False),
        (f"{ATTEND}import sys; sys.exit(3)", 3, False),
        (LATER, 0, False),
    ],
)
def test_strict(hooked, code, returncode, never_ran):
    done = hooked.python("-c", code + "\nprint('done')", flash="strict")
    assert done.returncode == returncode
    assert ("[mlxlm-flash] strict: flash attention never ran\n" in done.stderr) == never_ran
    assert done.stdout == ("" if "exit" in code or "raise" in code else "done\n")


def test_strict_runs_the_program_s_own_handlers_first(hooked):
    code = f"import atexit; atexit.register(print, 'saved'); {IMPORT}; atexit.register(print, 'closed')"
    done = hooked.python("-c", code, flash="strict")
    assert (done.returncode, done.stdout) == (1, "closed\nsaved\n")


def test_strict_leaves_a_forked_child_alone(hooked):
    fork = "if os.fork() == 0:\n    sys.exit(0)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    done = hooked.python("-c", f"import os, sys\n{IMPORT}\n{fork}", flash="strict")
    assert (done.returncode, done.stdout) == (1, "0\n")
    assert done.stderr.count("never ran") == done.stderr.count("flash attention ran") == 1


def test_where_the_patch_cannot_go_in(hooked):
    """It is said, and the program goes on; strict lets it go no further than mlx-lm."""
    code, env = f"print('begun'); {IMPORT}; print('done')", {"FLASHATTN_NUM_THREADS": "some"}
    done = hooked.python("-c", code, flash="1", env=env)
    assert (done.returncode, done.stdout) == (0, "begun\ndone\n")
    says = r"\[mlxlm-flash\] flash attention stays off: .* FLASHATTN_NUM_THREADS is 'some'.*\n"
    assert re.fullmatch(says, done.stderr)

    done = hooked.python("-c", code, flash="strict", env=env)
    assert (done.returncode, done.stdout) == (1, "begun\n")
    assert "FLASHATTN_NUM_THREADS is 'some'" in done.stderr.splitlines()[-1]


def test_the_import_machinery_is_as_it_was(hooked):
    code = """
import sys
from mlx_lm.models import base
print([f for f in sys.meta_path if type(f).__name__ == "Watch"], type(base.__loader__).__name__,
      "exec_module" in vars(base.__loader__), base.__spec__.loader is base.__loader__, base.__file__)
"""
    plain, done = hooked.python("-c", code), hooked.python("-c", code, flash="1")
    assert done.stdout == plain.stdout
    assert plain.stdout.startswith("[] SourceFileLoader False True ")


def test_a_program_that_enables_the_patch_itself(hooked):
    code = f"import mlxlm_flash_patch as flash\nflash.enable()\n{ATTEND}flash.disable()\n{ATTEND}"
    done = hooked.python("-c", code, flash="1")
    assert done.returncode == 0
    begins = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert begins == ["[mlxlm-flash] flash attention on", "[mlxlm-flash] flash attention ran"]
    assert "cpu_prefill 1 " in done.stderr


@pytest.mark.parametrize(
    ("flash", "lines", "end", "code"),
    [(None, 2, 0, ATTEND), ("1", 2, 0, ATTEND), ("0", 1, 0, ATTEND), ("strict", 2, 3, f"{IMPORT}, sys; sys.exit(3)")],
)
def test_together_with_run(hooked, tmp_path, flash, lines, end, code):
    """`run` says it once, and knows the program's own exit code."""
    (tmp_path / "script.py").write_text(code)
    done = hooked.run("mlxlm-flash", "run", tmp_path / "script.py", flash=flash, env=hooked.light)
    assert done.returncode == end
    assert done.stderr.count("[mlxlm-flash] flash attention ") == lines


@pytest.mark.parametrize("command", [["status"], ["doctor"]], ids=" ".join)
def test_the_command_itself_is_not_patched(hooked, command):
    done = hooked.run("mlxlm-flash", *command, flash="strict")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def gone(tmp_path_factory, light):
    """An environment from which the package was uninstalled, and the start-up file forgotten."""
    environment = Environment(tmp_path_factory.mktemp("gone") / "environment", light)
    environment.run("mlxlm-flash", "hook", "install")
    environment.uv("pip", "uninstall", "mlxlm-flash-patch")
    return environment


@pytest.mark.parametrize("flash", [None, "0", "1", "strict", "nonsense"])
def test_uninstalled(gone, flash):
    """Who still asks for it hears which file to delete."""
    done = gone.python("-c", f"{IMPORT}; print('done')", flash=flash)
    assert (done.returncode, done.stdout) == (0, "done\n")
    says = (
        "[mlxlm-flash] MLXLM_FLASH is set, and mlxlm-flash-patch is not installed any more: flash attention stays off. "
        f"Delete {gone.site_packages / NAME}\n"
    )
    assert done.stderr == ("" if flash in (None, "0") else says)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    ("fixture", "code", "flash"),
    [*(("hooked", ATTEND, flash) for flash in ("1", "strict", "nonsense")), ("gone", "", "1")],
)
def test_a_stderr_that_takes_nothing(request, stderr, fixture, code, flash):
    """Python itself ends with 120 where it cannot flush."""
    environment = request.getfixturevalue(fixture)
    command = f"{environment.folder}/bin/python -c '{code}print(1)' {stderr}"
    env = environment.env(flash, **environment.light)
    done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n"
