"""mlxlm-flash run: the program cannot tell, and neither can the shell. Python itself is the measure."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base
from mlxlm_flash_patch import cli, launch

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
    """A folder with a script, a module and a package that tell what they see."""
    (tmp_path / "script.py").write_text(WHO_AM_I)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "script.py").write_text(WHO_AM_I)
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "script.py")
    (tmp_path / "module.py").write_text(WHO_AM_I)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(WHO_AM_I)
    (tmp_path / "package" / "part.py").write_text(WHO_AM_I)
    return tmp_path


@pytest.fixture
def run(command):
    return lambda *arguments, **options: command("mlxlm-flash", "run", *arguments, **options)


@pytest.fixture
def python(command):
    return lambda *arguments, **options: command("python", *arguments, **options)


def own_lines(stderr):
    return [line for line in stderr.splitlines() if line.startswith("[mlxlm-flash] ")]


def other_lines(stderr):
    return [line for line in stderr.splitlines() if not line.startswith("[mlxlm-flash] ")]


@pytest.mark.parametrize(
    "program",
    [["script.py"], ["./inner/script.py"], ["link.py"], ["-m", "module"], ["-m", "package"], ["-m", "package.part"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "arguments",
    [[], ["-h", "--help", "--version", "-m", "--", "-x=1", "", "two words", "--strict"]],
    ids=["no arguments", "arguments like ours"],
)
def test_what_the_program_sees(run, python, folder, program, arguments):
    expected = python(*program, *arguments, cwd=folder)
    done = run(*program, *arguments, cwd=folder, flash="0")
    assert json.loads(done.stdout) == json.loads(expected.stdout)
    assert json.loads(done.stdout)["argv"][1:] == arguments


def test_a_script_by_its_absolute_path(run, python, folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    script = str(folder / "script.py")
    assert run(script, cwd=elsewhere, flash="0").stdout == python(script, cwd=elsewhere).stdout


def test_safe_path(run, folder, monkeypatch):
    """PYTHONSAFEPATH keeps the script's folder out of sys.path, here too."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    done = run(folder / "script.py", flash="0")
    assert json.loads(done.stdout)["path0"] != str(folder)


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


@pytest.mark.parametrize("end", ENDS)
def test_how_it_ends(run, python, tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(f"import atexit, os, signal, sys, threading, time\n{ENDS[end]}\n")
    expected, done = python(script), run(script, flash="0")
    assert done.returncode == expected.returncode
    assert done.stdout == expected.stdout
    assert other_lines(done.stderr)[-1:] == other_lines(expected.stderr)[-1:]
    if "Error" not in end and end != "KeyboardInterrupt":  # a traceback shows the runner's frames too
        assert other_lines(done.stderr) == other_lines(expected.stderr)


@pytest.mark.parametrize(("flash", "own"), [("0", "True"), ("1", "False")])
def test_long_calls_heed_control_c(run, tmp_path, flash, own):
    """While flash attention is on: flashattn_core.interruptible() puts a handler in, which is gone at the end."""
    script = tmp_path / "script.py"
    script.write_text("import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n")
    assert run(script, flash=flash).stdout == f"{own}\n"


@pytest.mark.parametrize("flash", ["0", "1"])
def test_control_c(tmp_path, flash):
    """The shell sees a process that died of SIGINT, so that it stops its own loop too."""
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    arguments = [Path(sys.executable).parent / "mlxlm-flash", "run", script]
    env = {**os.environ, "MLXLM_FLASH": flash}
    with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert other_lines(stderr)[-1] == "KeyboardInterrupt"


def test_streams(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.stdout.write(sys.stdin.read().upper())\nsys.stderr.write('to stderr\\n')\n")
    done = run(script, input="from stdin\n", flash="0")
    assert done.stdout == "FROM STDIN\n"
    assert other_lines(done.stderr) == ["to stderr"]


ATTENTION = """
import sys, threading
import mlx.core as mx
from mlx_lm.models.qwen2 import scaled_dot_product_attention

def attend(length):
    q = mx.ones((1, 2, length, 8))
    mx.eval(scaled_dot_product_attention(q, q, q, cache=None, scale=1.0, mask="causal"))
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise ValueError('the reason')", 1)])
def test_patched_to_the_end(run, tmp_path, end, code):
    """Both lines are there however the program ends, and the last one comes last."""
    script = tmp_path / "script.py"
    script.write_text(f"{ATTENTION}\nattend(12)\n{end}\n")
    done = run(script)
    assert done.returncode == code
    lines = done.stderr.splitlines()
    assert lines[0].startswith("[mlxlm-flash] flash attention on: mlx ")
    assert lines[-1] == "[mlxlm-flash] flash attention ran: cpu_prefill 1 · fallbacks: none"
    assert len(own_lines(done.stderr)) == 2


def test_threads_that_outlive_the_main_one_count(run, tmp_path):
    """Under strict too: the program is over when its last thread is."""
    script = tmp_path / "script.py"
    script.write_text(f"{ATTENTION}\nthreading.Timer(0.3, attend, [1]).start()\n")
    done = run(script, flash="strict")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].startswith("[mlxlm-flash] flash attention ran: cpu_decode 1 ")


def test_strict_and_flash_never_ran(run, tmp_path):
    """A success without flash attention is none."""
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    done = run(script, flash="strict")
    assert done.returncode == 1
    assert done.stdout == "done\n"
    assert done.stderr.startswith("[mlxlm-flash] flash attention on, strict: ")
    assert "\n[mlxlm-flash] strict: flash attention never ran\n" in done.stderr


@pytest.mark.parametrize(
    ("code", "mode", "expected"),
    [(None, "strict", 1), (0, "strict", 1), (3, "strict", 3), ("bye", "strict", "bye"), (0, "1", 0), (None, "0", None)],
)
def test_strict_overrules_success_only(monkeypatch, tmp_path, code, mode, expected):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = launch.Program(["program"], str(tmp_path), lambda: sys.exit(code))
    with flash.enabled(), pytest.raises(SystemExit) as end:
        launch.start(program, mode)
    assert end.value.code == expected


def test_a_forked_child_does_not_speak_at_its_end():
    stream = io.StringIO()
    launch._say_what_ran(stream, os.getpid() + 1)
    assert stream.getvalue() == ""
    launch._say_what_ran(stream, os.getpid())
    assert stream.getvalue().startswith("[mlxlm-flash] flash attention ran: ")


def test_strict_leaves_a_forked_child_alone(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = run(script, flash="strict")
    assert done.stdout == "0\n"
    assert done.stderr.count("never ran") == 1  # the parent's
    assert done.returncode == 1


def test_a_closed_stderr_is_no_error_at_the_end():
    stream = io.StringIO()
    stream.close()
    launch._say_what_ran(stream, os.getpid())


@pytest.mark.parametrize("value", ["", "2", "yes", "STRICT"])
def test_other_values_of_the_variable(run, tmp_path, value):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    done = run(script, flash=value)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"Error: MLXLM_FLASH is {value!r}, expected one of 0, 1, strict\n"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            ["mlx_lm.nothing"],
            "'mlx_lm.nothing' is no command of mlx-lm, and no file. The commands are mlx_lm, mlx_lm.awq",
        ),
        (["no/such/script.py"], "'no/such/script.py' is no command of mlx-lm, and no file"),
        (["--model"], "'--model' is no command"),
        (["."], "'.' is no command"),
        (["-m"], "-m is not followed by a module"),
        (["-m", "no_such_module"], "-m no_such_module: no such module"),
        (["-m", "no_such.module"], "-m no_such.module: No module named 'no_such'"),
        (["-m", ""], "-m : "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unknown_programs(run, program, says):
    done = run(*program)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"Error: {says}")
    assert done.stderr.count("\n") == 1


def test_no_program(run):
    done = run()
    assert done.returncode == 2
    assert "Missing argument" in done.stderr


def test_a_refusal_to_patch_is_one_line(monkeypatch, capsys, tmp_path):
    """Another mlx-lm: nothing is run, since it would run without flash attention."""
    monkeypatch.setattr(base, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    exec("def scaled_dot_product_attention(q, k, v): ...", vars(base))
    (tmp_path / "script.py").write_text("print('ran')")
    monkeypatch.setattr(sys, "argv", ["mlxlm-flash", "run", str(tmp_path / "script.py")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr()
    assert end.value.code == 1
    assert printed.out == ""
    assert printed.err.startswith("Error: [enable] mlx_lm.models.base.scaled_dot_product_attention takes (q, k, v);")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("name", sorted(distribution("mlx-lm").entry_points.select(group="console_scripts").names))
def test_commands_of_mlx_lm(name):
    """They see the path that the shell would have found."""
    folder = str(Path(sys.executable).parent)
    program = launch.find(name, ["--help", "-h"])
    assert program.argv == [shutil.which(name, path=folder), "--help", "-h"]
    assert program.folder == folder
