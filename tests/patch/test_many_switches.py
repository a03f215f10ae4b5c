"""The patch is put in and taken out a thousand times, with a call each time: nothing grows, all is as it was."""

import json
import subprocess
import sys

import pytest

GROWTH = """
import json, os, sys, warnings, mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.models import base, qwen2

x = mx.random.normal((1, 2, 12, 8))
original = base.scaled_dot_product_attention

def run(rounds):
    for _ in range(rounds):
        flash.enable("qwen2", strict=True)
        mx.eval(qwen2.scaled_dot_product_attention(x, x, x, cache=None, scale=1.0, mask="causal"))
        flash.disable()  # raises if flash never ran

def held():
    pages = int(open("/proc/self/statm").read().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGESIZE"),
        "active": mx.get_active_memory(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "hooks": len(sys.meta_path),
        "filters": len(warnings.filters),
    }

run(100)
before = held()
run(1000)
assert base.scaled_dot_product_attention is qwen2.scaled_dot_product_attention is original
print(json.dumps({name: number - before[name] for name, number in held().items()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc; run this test on Linux")
def test_nothing_grows():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout.splitlines()[-1])
    assert grown.pop("resident") < 1 << 20
    assert set(grown.values()) == {0}, grown
