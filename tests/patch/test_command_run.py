"""Under mlxlm-flash run, a program's arguments, streams, exit code and signals are as under Python."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlxlm_flash_patch import cli

from tests.patch.arms import ATTEND, LATER
from tests.promises import promise

OWN = "[mlxlm-flash] "
WHO_AM_I = """
import json, sys
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "doc": __doc__, "spec": getattr(__spec__, "name", None), "cwd": __import__("os").getcwd(),
}))
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a script, a module and a package. Each of them prints its sys.argv and more (WHO_AM_I)."""
    for name in ("script.py", "inner/script.py", "module.py", "package/__main__.py", "package/part.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(WHO_AM_I)
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "script.py")
    (tmp_path / "package" / "__init__.py").write_text("")
    return tmp_path


@pytest.fixture
def run(command):
    return lambda *arguments, **options: command("mlxlm-flash", "run", *arguments, **options)


@pytest.fixture
def run_script(run, light, tmp_path):
    """run_script(text): runs this program with `mlxlm-flash run`, and returns the finished process."""

    def write_and_run(text, **options):
        (tmp_path / "script.py").write_text(text)
        return run(tmp_path / "script.py", env=light, **options)

    return write_and_run


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(*arguments): runs a command that must fail. Returns its exit code and the one line of its error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mlxlm-flash", "run", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        assert printed.out == ""
        [line] = printed.err.splitlines()
        return end.value.code, line

    return run


def other_lines(stderr):
    return [line for line in stderr.splitlines() if not line.startswith(OWN)]


@promise("under mlxlm-flash run a program's arguments are its own")
@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (["link.py"], ["-h", "--help", "--version", "-m", "--", "-x=1", "", "two words", "--strict"]),
        (["script.py"], []),
        (["./inner/script.py"], []),
        (["-m", "module"], []),
        (["-m", "package"], ["-h", "--", "-x=1"]),
        (["-m", "package.part"], []),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_the_program_sees(run, command, folder, program, arguments):
    done = run(*program, *arguments, cwd=folder, flash="0")
    assert json.loads(done.stdout) == json.loads(command("python", *program, *arguments, cwd=folder).stdout)
    assert json.loads(done.stdout)["argv"][1:] == arguments


@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize(
    ("flash", "option", "how"),
    [
        (None, ["--precision", "input"], "on: "),
        ("float32", [], "on, precision float32: "),
        ("float32", ["--precision", "input"], "on: "),
        ("float32,strict", [], "on, strict, precision float32: "),
        ("float32,strict", ["--precision", "input"], "on, strict: "),
        ("strict", ["--precision", "float32"], "on, strict, precision float32: "),
        ("0", ["--precision=float32"], "off: "),
        (None, ["--precision=float32"], "on, precision float32: "),
    ],
    ids=str,
)
def test_the_option_and_the_variable(run, folder, flash, option, how):
    """The option overrules the precision in MLXLM_FLASH. Options after the program's name belong to the program."""
    done = run(*option, "script.py", "--precision", "-h", cwd=folder, flash=flash)
    assert json.loads(done.stdout)["argv"] == ["script.py", "--precision", "-h"]
    assert done.stderr.startswith(f"{OWN}flash attention {how}")


ENDS = {
    "end of file": "print('done')",
    "exit()": "sys.exit()",
    "exit(0)": "sys.exit(0)",
    "exit(3)": "sys.exit(3)",
    "exit(True)": "sys.exit(True)",
    "exit(message)": "sys.exit('a message')",
    "exit(object)": "sys.exit(['a', 'list'])",
    "_exit": "os._exit(5)",
    "handlers": "atexit.register(print, 'at exit'); sys.exit(4)",
    "threads": "threading.Thread(target=lambda: (time.sleep(0.2), print('late', __name__))).start()",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "ValueError": "raise ValueError('the reason')",
    "BrokenPipeError": "raise BrokenPipeError('the pipe')",
    "EOFError": "raise EOFError",
    "SyntaxError": "1 +",
}


@promise("under mlxlm-flash run a program's streams and exit code are its own")
@pytest.mark.rotate(1, default=5)
@pytest.mark.parametrize("end", ENDS)
def test_how_it_ends(run_script, command, tmp_path, end):
    done = run_script(f"import atexit, os, signal, sys, threading, time\n{ENDS[end]}\n", flash="0")
    expected = command("python", tmp_path / "script.py")
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert other_lines(done.stderr)[-1:] == other_lines(expected.stderr)[-1:]
    if "Error" not in end and end != "KeyboardInterrupt":  # a traceback also shows frames of mlxlm-flash
        assert other_lines(done.stderr) == other_lines(expected.stderr)


@promise("under mlxlm-flash run signals are the program's own")
@pytest.mark.parametrize("flash", ["0", "1"])
def test_control_c(tmp_path, flash):
    """After Ctrl-C, the process dies of SIGINT, so a shell loop around the command ends, too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)\n"
        "time.sleep(60)\n"
    )
    arguments = [Path(sys.executable).parent / "mlxlm-flash", "run", script]
    env = {**os.environ, "MLXLM_FLASH": flash}
    with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert other_lines(stderr)[-1] == "KeyboardInterrupt"


RAN = "cpu_prefill 1 · fallbacks: none"
MLXS = "mx.fast.scaled_dot_product_attention"
THEIRS_RAN = f"none · fallbacks: none · another library has replaced {MLXS} with __main__.f"
REPLACED = f"import mlx.core as mx\ndef f(q, *_, **__): return q\n{MLXS} = f\n"


@pytest.mark.rotate(1, default=2)
@pytest.mark.parametrize(
    ("text", "flash", "code", "ran"),
    [
        (f"{ATTEND}import sys\nsys.exit(3)", None, 3, RAN),
        (LATER, "strict", 0, RAN),
        (f"{ATTEND}raise ValueError('the reason')", None, 1, RAN),
        ("print('done')", None, 0, "none · fallbacks: none"),
        (f"{REPLACED}{ATTEND}", None, 0, THEIRS_RAN),
    ],
    ids=["exit code", "a thread that outlives the main one", "ValueError", "no attention", "another library's"],
)
def test_patched_to_the_end(run_script, text, flash, code, ran):
    """mlxlm-flash prints the first and the last line of stderr, however the program ends.

    The last line says which attention ran, also in threads, and names functions of other libraries.
    """
    done = run_script(text, flash=flash)
    assert done.returncode == code
    first, *_, last = done.stderr.splitlines()
    assert first.startswith(f"{OWN}flash attention on{', strict' * (flash == 'strict')}: mlx ")
    assert last == f"{OWN}flash attention ran: {ran}"
    assert done.stderr.count(f"{OWN}flash attention ") == 2


def test_strict_and_flash_never_ran(run_script):
    """With strict, a program that succeeds without flash attention exits with 1. A forked child keeps its exit code."""
    fork = "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    done = run_script(fork, flash="strict")
    assert (done.returncode, done.stdout) == (1, "0\n")
    assert done.stderr.startswith(f"{OWN}flash attention on, strict: ")
    assert done.stderr.count(f"{OWN}strict: flash attention never ran\n") == 1  # only the parent prints it


def test_a_program_that_only_starts_others(run):
    """With strict, too, mlx.launch keeps its exit code. A line names the command that patches its child processes."""
    done = run("mlx.launch", "--", sys.executable, "-c", "print('a child')", flash="strict")
    assert (done.returncode, done.stdout) == (0, "a child\n")
    [line] = [line for line in done.stderr.splitlines() if line.startswith(f"{OWN}flash attention")]
    assert line.endswith("are not patched; to patch each of them: mlx.launch OPTIONS -- mlxlm-flash run COMMAND")


def test_ranks_of_mlx_launch(command, folder):
    done = command("mlx.launch", "--", sys.executable, "-m", "mlxlm_flash_patch", "run", folder / "script.py")
    assert f"{OWN}flash attention on: mlx " in done.stderr


@pytest.mark.parametrize("value", ["", "2", "yes", "STRICT", "faster", "strict,float32"])
def test_other_values_of_the_variable(refused, folder, monkeypatch, value):
    monkeypatch.setenv("MLXLM_FLASH", value)
    assert refused(str(folder / "script.py")) == (
        2,
        f"Error: MLXLM_FLASH is {value!r}, expected one of 0, 1, strict, float32, float32,strict",
    )


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (["mlx_lm.nothing"], "'mlx_lm.nothing' is neither a command that a package in this environment installs nor "),
        (["no/such/script.py"], "'no/such/script.py' is neither a command "),
        (["--model"], "'--model' is neither a command "),
        (["."], "'.' is neither a command "),
        (["-m"], "-m needs the name of a module next"),
        (["python"], "python needs a file or -m MODULE next"),
        (["python", "-c", "1"], "python needs a file or -m MODULE next"),
        (["-m", "no_such_module"], "-m no_such_module: no such module"),
        (["-m", "no_such.module"], "-m no_such.module: No module named 'no_such'"),
        (["-m", ""], "-m : "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unknown_programs(refused, program, says):
    code, line = refused(*program)
    assert code == 2
    assert line.startswith(f"Error: {says}")


THEIRS = """
import mlx.core as mx, sys

def main():
    x = mx.ones((1, 1, 12, 8))
    mx.eval(mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0))
    print(sys.argv[1:])
    return 3
"""


@promise("mlxlm-flash run starts any installed command")
@pytest.mark.parametrize("how", [("mlxlm-flash",), ("python", "-m", "mlxlm_flash_patch")], ids=" ".join)
def test_a_command_of_any_package(command, tmp_path, how):
    """The command here, theirs.generate, calls MLX's attention function, and does not import mlx-lm."""
    information = tmp_path / "theirs-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[console_scripts]\ntheirs.generate = theirs:main\n")
    (tmp_path / "theirs.py").write_text(THEIRS)
    done = command(*how, "run", "theirs.generate", "--steps", "2", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (3, "['--steps', '2']\n")
    assert done.stderr.splitlines()[-1] == f"{OWN}flash attention ran: {RAN}"
