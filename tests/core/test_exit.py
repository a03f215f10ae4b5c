"""The interpreter ends as it would without flash attention, whatever is unevaluated, queued or running.

Not so with a daemon thread inside of mx.eval: MLX itself, without flash attention, ends the process with SIGABRT then.
"""

import pytest

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
