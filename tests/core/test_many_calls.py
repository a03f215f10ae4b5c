"""Calls of every kind leave no memory, thread or open file behind. test_memory.py has 100,000 calls of one kind."""

import json

import pytest

GROWTH = """
import json, os, mlx.core as mx
from flashattn_core import flash_attention, plan, quantized_flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

q, x = mx.random.normal((1, 4, 12, 64)), mx.random.normal((1, 2, 12, 64))
packed = mx.quantize(x, bits=8)
tree = Tree.from_parents([-1, 0, 0, 1])
sinks = mx.zeros(4)
gradient = mx.grad(lambda a: flash_attention(a, x, x, mask="causal", sinks=sinks).sum())
compiled = mx.compile(lambda a: flash_attention(a, x, x, mask=SlidingWindow(3)))

def refused():
    try:
        flash_attention(q, x, x, mask="no such mask")
    except ValueError:
        return q

KINDS = [
    lambda: flash_attention(q, x, x),
    lambda: flash_attention(q[:, :, :1], x, x, mask=KeyRange(mx.array([3]))),
    lambda: flash_attention(q, x, x, mask=Causal() & mx.zeros((12, 12)), return_lse=True),
    lambda: flash_attention(q, x, x, mask=tree, softcap=3.0, alibi_slopes=sinks),
    lambda: quantized_flash_attention(q, packed, packed),
    lambda: gradient(q),
    lambda: compiled(q),
    lambda: mx.vmap(flash_attention)(q[None], x[None], x[None]),
    lambda: (flash_attention(q, x, x), q)[1],  # never evaluated
    lambda: (plan(q, x, x), refused())[1],
]

def run(rounds):
    for _ in range(rounds):
        for kind in KINDS:
            mx.eval(kind())

def held():
    mx.synchronize()
    pages = int(open("/proc/self/statm").read().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGESIZE"),
        "active": mx.get_active_memory(),
        "cache": mx.get_cache_memory(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }

run(100)
before = held()
run(1000)
print(json.dumps({name: number - before[name] for name, number in held().items()}))
"""


@pytest.mark.skipif("sys.platform != 'linux'", reason="/proc; run this test on Linux")
def test_nothing_grows(run_python):
    done = run_python(GROWTH)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert grown.pop("resident") < 1 << 20  # 10,000 calls: 105 bytes a call would be more
    assert grown == {"active": 0, "cache": 0, "threads": 0, "files": 0}
