"""No array of size L*S is ever made: memory grows linearly, measured for the whole process."""

import json

import pytest

PEAK = """
import json, mlx.core as mx, flashattn_core
from flashattn_core.masks import KeyRange, SlidingWindow

def resident(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

L = {length}
shape = (1, 4, L, 64)
q, k, v = (mx.random.normal(shape) for _ in range(3))
mx.eval(q, k, v, flashattn_core.flash_attention(q[:, :, :256], k, v))  # threads and their scratch are there now
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
out = flashattn_core.flash_attention(q, k, v, mask={mask})
mx.eval(out)
print(json.dumps({{"extra": resident("VmHWM") - before, "tensors": 4 * q.nbytes + q.nbytes // 64}}))
"""


@pytest.mark.parametrize(
    "mask", ["None", "'causal'", "SlidingWindow(300)", "KeyRange(mx.array([5]))", "mx.arange({length}) > 3"]
)
@pytest.mark.parametrize("length", [2048, pytest.param(8192, marks=pytest.mark.long("twice as long is linear, too"))])
def test_extra_memory_is_the_outputs(run_python, length, mask):
    result = run_python(PEAK.format(length=length, mask=mask.format(length=length)))
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    # Scores alone would take 4 * L * L * 4 bytes: 268 MB at 2048. The outputs are a quarter of the tensors.
    assert measured["extra"] <= 0.3 * measured["tensors"] + 2e6


@pytest.mark.long("test_many_calls.py has 10,000 of all kinds")
def test_a_hundred_thousand_calls_leave_nothing_behind(run_python):
    code = """
import mlx.core as mx, flashattn_core
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
x = mx.ones((1, 2, 1, 8))
k = mx.ones((1, 2, 600, 8))
def run(n):
    for _ in range(n):
        mx.eval(flashattn_core.flash_attention(x, k, k))
run(5000)
before = resident()
run(100_000)
print(resident() - before)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 2048, "kB grown"
