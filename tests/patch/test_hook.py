"""mlxlm-flash hook: plain programs heed MLXLM_FLASH, and nothing else changes. In an environment of its own."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner
from mlx_lm.utils import load
from mlxlm_flash_patch import hook
from mlxlm_flash_patch.cli import cli

ROOT = Path(__file__).parents[2]
NAME = "mlxlm-flash.pth"
GENERATE = ("--prompt", "Attention is", "--ignore-chat-template", "--max-tokens", "12", "--verbose", "False")
ATTEND = """
import mlx.core as mx
from mlx_lm.models.qwen2 import scaled_dot_product_attention
q = mx.ones((1, 2, 12, 8))
mx.eval(scaled_dot_product_attention(q, q, q, cache=None, scale=1.0, mask="causal"))
"""


class Environment:
    """A virtual environment with mlx-lm and this package as a wheel; what they need is found in the tests' own."""

    def __init__(self, folder):
        self.folder = folder
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
        env = {key: value for key, value in os.environ.items() if key not in ("MLXLM_FLASH", "VIRTUAL_ENV")}
        return {**env, "HF_HUB_OFFLINE": "1", **({} if flash is None else {"MLXLM_FLASH": flash}), **more}

    def run(self, name, *arguments, flash=None, env=None, **options):
        command = [self.folder / "bin" / name, *arguments]
        options = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run(command, env=self.env(flash, **(env or {})), **options)

    def python(self, *arguments, **options):
        return self.run("python", *arguments, **options)


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("bare") / "environment")


@pytest.fixture
def hooked(bare):
    """With the hook installed, and taken out afterwards."""
    assert bare.run("mlxlm-flash", "hook", "install").returncode == 0
    yield bare
    assert bare.run("mlxlm-flash", "hook", "remove").returncode == 0


def test_one_file_comes_and_goes(bare):
    before, path = bare.files(), str(bare.site_packages / NAME)
    done = bare.run("mlxlm-flash", "hook", "install")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {path}\n")
    assert bare.files() - before == {path}
    assert bare.run("mlxlm-flash", "hook", "install").returncode == 0  # again is no error
    assert bare.run("mlxlm-flash", "hook", "remove").stdout == f"deleted {path}\n"
    assert bare.files() == before
    done = bare.run("mlxlm-flash", "hook", "remove")
    assert (done.returncode, done.stdout) == (0, "there was none\n")


def test_status(bare):
    def said(flash=None):
        return bare.run("mlxlm-flash", "hook", "status", flash=flash).stdout.splitlines()

    path = bare.site_packages / NAME
    where = f"environment: {bare.folder}, Python {sys.version.split()[0]}"
    assert said() == [f"{path}: not installed", where, "MLXLM_FLASH: not set"]
    bare.run("mlxlm-flash", "hook", "install")
    assert said("strict") == [f"{path}: installed", where, "MLXLM_FLASH: strict"]
    path.write_text("import os\n")
    assert said()[0] == f"{path}: installed by another version of mlxlm-flash-patch"
    assert bare.run("mlxlm-flash", "hook", "remove").returncode == 0
    assert not path.exists()


def test_a_full_disk_leaves_nothing_half_written(bare):
    before = bare.files()
    done = bare.run(
        "mlxlm-flash", "hook", "install", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    )
    assert done.returncode == 1
    assert done.stderr == "Error: nothing is installed: [Errno 27] File too large\n"
    assert bare.files() == before


def test_a_folder_that_cannot_be_written_to(monkeypatch):
    """Root may write anywhere, and is nobody for once."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        monkeypatch.setattr(hook, "path", lambda: Path(folder, NAME))
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            done = CliRunner().invoke(cli, ["hook", "install"])
        finally:
            os.seteuid(user)
        assert not os.listdir(folder)
    assert done.exit_code == 1
    assert done.output.startswith("Error: nothing is installed: [Errno 13] Permission denied: ")
    assert done.output.count("\n") == 1


def test_where_python_reads_no_start_up_files(bare, tmp_path):
    """As after `pip install --target`: a file there would be without effect."""
    for found in bare.site_packages.glob("mlxlm_flash*"):
        (shutil.copytree if found.is_dir() else shutil.copy)(found, tmp_path / found.name)
    before = set(tmp_path.rglob("*"))
    done = bare.run("mlxlm-flash", "hook", "install", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: nothing is installed: {tmp_path} holds mlxlm-flash-patch, and is no site-")
    assert not [path for path in set(tmp_path.rglob("*")) - before if path.suffix == ".pth"]


def modules(done):
    assert done.returncode == 0
    return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("flash", [None, "0"])
def test_without_the_variable_it_costs_no_import(bare, flash):
    plain = modules(bare.python("-X", "importtime", "-c", "pass", flash=flash))
    bare.run("mlxlm-flash", "hook", "install")
    try:
        assert modules(bare.python("-X", "importtime", "-c", "pass", flash=flash)) == plain
        done = bare.python("-c", "import sys; print(sys.meta_path)", flash=flash)
        assert "Watch" not in done.stdout
        assert done.stderr == ""
    finally:
        bare.run("mlxlm-flash", "hook", "remove")


@pytest.mark.parametrize("flash", ["1", "strict"])
def test_with_the_variable_it_waits_for_mlx_lm(bare, flash):
    """Other programs, such as pip, import one small module and a built-in one, and hear nothing."""
    plain = modules(bare.python("-X", "importtime", "-c", "pass", flash=flash))
    bare.run("mlxlm-flash", "hook", "install")
    try:
        assert modules(bare.python("-X", "importtime", "-c", "pass", flash=flash)) - plain == {
            "atexit",
            "mlxlm_flash_startup",
        }
        done = bare.python("-c", "print('done')", flash=flash)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    finally:
        bare.run("mlxlm-flash", "hook", "remove")


@pytest.fixture(scope="module")
def text(model_folder):
    """What the unmodified program prints."""
    from mlx_lm.generate import generate

    model, tokenizer = load(str(model_folder))
    return generate(model, tokenizer, "Attention is", max_tokens=12) + "\n"


FIRST = r"\[mlxlm-flash\] flash attention on{}: mlx .* · mlx-lm .* · cpu .*"
LAST = r"\[mlxlm-flash\] flash attention ran: cpu_prefill \d+(, cpu_decode \d+)? · fallbacks: none"


@pytest.mark.parametrize(("flash", "how"), [("1", ""), ("strict", ", strict")])
def test_plain_generate(hooked, model_folder, text, flash, how):
    done = hooked.run("mlx_lm.generate", "--model", model_folder, *GENERATE, flash=flash)
    assert (done.returncode, done.stdout) == (0, text)
    first, last = done.stderr.splitlines()
    assert re.fullmatch(FIRST.format(how), first)
    assert re.fullmatch(LAST, last)


@pytest.mark.parametrize("flash", [None, "0"])
def test_plain_generate_without(hooked, model_folder, text, flash):
    done = hooked.run("mlx_lm.generate", "--model", model_folder, *GENERATE, flash=flash)
    assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


def test_plain_chat(hooked, chat_folder):
    arguments = ("mlx_lm.chat", "--model", chat_folder, "--max-tokens", "8")
    plain = hooked.run(*arguments, input="Attention is\nq\n")
    done = hooked.run(*arguments, input="Attention is\nq\n", flash="strict")
    assert plain.returncode == done.returncode == 0
    conversation, expected = (re.sub(r"[\d.]+ tok/s", "", said.stdout) for said in (done, plain))
    assert conversation == expected
    assert re.fullmatch(LAST, done.stderr.splitlines()[-1])


def test_plain_server(hooked, served):
    """As people end it: with Ctrl-C."""
    with served([hooked.folder / "bin" / "mlx_lm.server"], hooked.env("strict")) as (ask, process):
        assert ask("Attention is")["usage"]["completion_tokens"] == 8
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGABRT)  # see test_command_chat.py
    assert re.search(f"^{LAST}$", stderr, re.MULTILINE)


@pytest.mark.parametrize("program", [["script.py"], ["-m", "script"], ["-c", ATTEND], ["-I", "script.py"], ["-E", "-"]])
def test_any_program(hooked, tmp_path, program):
    (tmp_path / "script.py").write_text(ATTEND)
    done = hooked.python(*program, flash="1", cwd=tmp_path, input=ATTEND)
    assert done.returncode == 0
    first, last = done.stderr.splitlines()
    assert re.fullmatch(FIRST.format(""), first)
    assert re.fullmatch(LAST, last)


def test_without_site_there_is_no_hook(hooked):
    done = hooked.python("-S", "-c", "import sys; print('mlxlm_flash_startup' in sys.modules)", flash="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_an_environment_made_from_it(hooked, tmp_path):
    done = hooked.python("-m", "venv", "--without-pip", tmp_path / "inner", flash="1")
    assert (done.returncode, done.stderr) == (0, "")
    inner = tmp_path / "inner" / "bin" / "python"
    done = subprocess.run([inner, "-c", "pass"], env=hooked.env("1"), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("value", ["", "2", "yes", "STRICT", "strict\n"])
def test_a_value_that_means_nothing(hooked, value):
    done = hooked.python("-c", "import sys; print(sys.meta_path)", flash=value)
    assert done.returncode == 0
    assert "Watch" not in done.stdout
    expected = f"[mlxlm-flash] MLXLM_FLASH is {value!r}, expected one of 0, 1, strict: flash attention stays off\n"
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("code", "returncode", "never_ran"),
    [
        ("import json", 0, False),  # nothing of mlx-lm
        ("import mlx_lm.models.base", 1, True),
        ("import mlx_lm.models.base, sys; sys.exit(0)", 1, True),
        ("import mlx_lm.models.base; raise KeyError", 1, True),
        (ATTEND, 0, False),
        (ATTEND + "import sys; sys.exit(3)", 3, False),
        (f"import mlx_lm.models.qwen2, threading\nthreading.Timer(0.3, exec, [{ATTEND!r}, {{}}]).start()", 0, False),
    ],
)
def test_strict(hooked, code, returncode, never_ran):
    done = hooked.python("-c", code + "\nprint('done')", flash="strict")
    assert done.returncode == returncode
    assert ("[mlxlm-flash] strict: flash attention never ran\n" in done.stderr) == never_ran
    assert done.stdout == ("" if "exit" in code or "raise" in code else "done\n")


def test_strict_runs_the_program_s_own_handlers_first(hooked):
    code = "import atexit; atexit.register(print, 'saved'); import mlx_lm.models.base; atexit.register(print, 'closed')"
    done = hooked.python("-c", code, flash="strict")
    assert (done.returncode, done.stdout) == (1, "closed\nsaved\n")


def test_strict_leaves_a_forked_child_alone(hooked):
    code = """
import os, sys, mlx_lm.models.base
if os.fork() == 0:
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = hooked.python("-c", code, flash="strict")
    assert (done.returncode, done.stdout) == (1, "0\n")
    assert done.stderr.count("never ran") == done.stderr.count("flash attention ran") == 1


def test_where_the_patch_cannot_go_in(hooked):
    """It is said, and the program goes on; strict lets it go no further than mlx-lm."""
    code = "print('begun'); import mlx_lm.models.base; print('done')"
    done = hooked.python("-c", code, flash="1", env={"FLASHATTN_NUM_THREADS": "some"})
    assert (done.returncode, done.stdout) == (0, "begun\ndone\n")
    assert re.fullmatch(
        r"\[mlxlm-flash\] flash attention stays off: .* FLASHATTN_NUM_THREADS is 'some'.*\n", done.stderr
    )

    done = hooked.python("-c", code, flash="strict", env={"FLASHATTN_NUM_THREADS": "some"})
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
    code = "import mlxlm_flash_patch as flash\nflash.enable('qwen2')\n" + ATTEND + "flash.disable()\n" + ATTEND
    done = hooked.python("-c", code, flash="1")
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "[mlxlm-flash] flash attention on",
        "[mlxlm-flash] flash attention ran",
    ]
    assert "cpu_prefill 1 " in done.stderr


@pytest.mark.parametrize(("flash", "lines"), [(None, 2), ("1", 2), ("strict", 2), ("0", 1)])
def test_together_with_run(hooked, tmp_path, flash, lines):
    (tmp_path / "script.py").write_text(ATTEND)
    done = hooked.run("mlxlm-flash", "run", tmp_path / "script.py", flash=flash)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == lines


def test_strict_together_with_run(hooked, tmp_path):
    (tmp_path / "script.py").write_text("import mlx_lm.models.base, sys; sys.exit(3)")
    done = hooked.run("mlxlm-flash", "run", tmp_path / "script.py", flash="strict")
    assert done.returncode == 3  # which the hook alone would not know
    assert done.stderr.count("flash attention ran") == 1


@pytest.mark.parametrize("command", [["status"], ["doctor"]], ids=" ".join)
def test_the_command_itself_is_not_patched(hooked, command):
    done = hooked.run("mlxlm-flash", *command, flash="strict")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("flash", ["1", "strict", "nonsense"])
def test_a_stderr_that_takes_nothing(hooked, stderr, flash):
    """Python itself ends with 120 where it cannot flush."""
    command = f"{hooked.folder}/bin/python -c '{ATTEND}print(1)' {stderr}"
    done = subprocess.run(command, shell=True, env=hooked.env(flash), capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n"


@pytest.fixture(scope="module")
def gone(tmp_path_factory):
    """An environment from which the package was uninstalled, and the start-up file forgotten."""
    environment = Environment(tmp_path_factory.mktemp("gone") / "environment")
    environment.run("mlxlm-flash", "hook", "install")
    environment.uv("pip", "uninstall", "mlxlm-flash-patch")
    return environment


@pytest.mark.parametrize("flash", [None, "0"])
def test_uninstalled(gone, flash):
    done = gone.python("-c", "import mlx_lm.models.base; print('done')", flash=flash)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("flash", ["1", "strict", "nonsense"])
def test_uninstalled_and_still_asked_for(gone, flash):
    done = gone.python("-c", "print('done')", flash=flash)
    assert (done.returncode, done.stdout) == (0, "done\n")
    expected = (
        "[mlxlm-flash] MLXLM_FLASH is set, and mlxlm-flash-patch is not installed any more: flash attention stays off. "
    )
    assert done.stderr == f"{expected}Delete {gone.site_packages / NAME}\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_uninstalled_and_nobody_listens(gone, stderr):
    command = f"{gone.folder}/bin/python -c 'print(1)' {stderr}"
    done = subprocess.run(command, shell=True, env=gone.env("1"), capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n"
