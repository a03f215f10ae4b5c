"""The extension in its process: the version check, forks, idle threads, Python's modes, and the end of it all.

The interpreter ends as it would without flash attention, whatever is unevaluated, queued or running. A daemon thread in
mx.eval ends it with SIGABRT, and does so without flash attention, too.
"""

import os
import subprocess
import sys
import textwrap

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD; run this test on Linux")
def test_another_mlx_is_refused_before_anything_runs(run_python, tmp_path):
    source = tmp_path / "other.cpp"
    source.write_text('namespace mlx::core { const char* version() { return "0.99.1"; } }')
    library = tmp_path / "other.so"
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    result = run_python("import flashattn_core", LD_PRELOAD=str(library))
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: flashattn_core was built for mlx 0.32.4 and found mlx 0.99.1.")
    assert f"pip install '{'mlx[cpu]' if sys.platform == 'linux' else 'mlx'}==0.32.4'" in last


def test_a_forked_child_has_its_own_threads(run_python):
    # MLX's own streams do not survive a fork, so the child calls the kernels through a stream of its own.
    code = textwrap.dedent("""
        import os, sys, mlx.core as mx, flashattn_core
        def threads():
            return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else None
        x = mx.random.normal((2, 4, 100, 64))
        expected = flashattn_core.flash_attention(x, x, x)
        mx.eval(x, expected)
        child = os.fork()
        if child == 0:
            stream = mx.new_stream(mx.cpu)
            mx.eval(mx.negative(x, stream=stream))
            before = threads()
            out = flashattn_core.flash_attention(x, x, x, stream=stream)
            if not mx.array_equal(out, expected, stream=stream):
                os._exit(3)
            os._exit(0 if before is None or threads() == before + 2 else 4)
        assert os.waitpid(child, 0)[1] == 0
        assert mx.array_equal(flashattn_core.flash_attention(x, x, x), expected)
    """)
    result = run_python(code, FLASHATTN_NUM_THREADS="3")
    assert result.returncode == 0, result.stderr


def test_idle_threads_sleep(run_python):
    code = """
import time, mlx.core as mx, flashattn_core
x = mx.random.normal((2, 4, 300, 64))
mx.eval(flashattn_core.flash_attention(x, x, x))
time.sleep(0.05)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""
    result = run_python(code, FLASHATTN_NUM_THREADS="4")
    assert float(result.stdout) < 0.05, result.stderr  # seconds of processor time in half a second of nothing


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks are Linux's")
def test_threads_follow_the_affinity_mask(run_python):
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import flashattn_core
print(flashattn_core.backends()["cpu"])
"""
    assert run_python(code).stdout.strip().endswith(", 1 thread")


CALL = """
import mlx.core as mx, flashattn_core
x = mx.ones((1, 2, 3, 8))
print((flashattn_core.flash_attention(x, x, x, mask=flashattn_core.masks.Causal()) == 1).all().item())
try:
    flashattn_core.flash_attention(x, x, x[..., :2, :])
except ValueError as error:
    print("refused")
"""


@pytest.mark.parametrize(
    "flags", [["-I"], ["-O"], ["-OO"], ["-X", "dev"], ["-W", "error", "-bb"], ["-B", "-P"]], ids=str
)
def test_import_and_call(run_python, flags):
    """Isolated, without assertions and docstrings, with all warnings."""
    done = run_python(CALL, *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nrefused\n", "")


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
    "at work in another thread": """
threading.Thread(target=lambda: [mx.eval(attend()) for _ in range(5)]).start()
""",
    "with threads waiting awake": "mx.eval(attend())",
}


@pytest.mark.rotate(5)
@pytest.mark.parametrize("state", ENDS)
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(7)", 7), ("raise KeyError('planned')", 1)], ids=str)
def test_exit_code_and_streams_are_the_program_s(run_python, state, end, code):
    done = run_python(SET_UP + ENDS[state] + f"\nprint('last line')\n{end}\n", FLASHATTN_NUM_THREADS="3")
    assert done.returncode == code, done.stderr
    assert done.stdout == "last line\n"
    assert done.stderr == "" if code != 1 else done.stderr.endswith("KeyError: 'planned'\n")


def test_arrays_that_outlive_the_interpreter_s_modules(run_python):
    """An array that an exit handler evaluates, when much of the interpreter is gone."""
    code = SET_UP + "import atexit; atexit.register(lambda: print(mx.isfinite(attend()).all().item()))"
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
