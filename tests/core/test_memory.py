"""Prefill, decode and gradient allocate no array of size L*S. After a call only the threads' scratch memory stays.

The tests measure whole processes.
"""

import json

import pytest

from tests.core.backward_memory import Call, peak_extra
from tests.core.programs import python
from tests.promises import promise

# print_peak() prints by how many bytes the process grows during a call, and the bytes of the call's output.
PRINT_PEAK = """
import json, mlx.core as mx
from flashattn_core import flash_attention, plan
from flashattn_core.masks import KeyRange, SlidingWindow

def resident(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

def print_peak(call):
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # from now on VmHWM is the peak
    out = call()
    mx.eval(out)
    print(json.dumps({"extra": resident("VmHWM") - before, "out": out.nbytes}))
"""
PREFILL = """
L = {length}
q, k, v = (mx.random.normal((1, 4, L, 64)) for _ in range(3))
mx.eval(q, k, v, flash_attention(q[:, :, :256], k, v))  # makes the threads and their scratch
print_peak(lambda: flash_attention(q, k, v, mask={mask}))
"""


@promise("a call allocates no array of size L * S, only its outputs and scratch per thread")
@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize(
    "mask", ["None", "'causal'", "SlidingWindow(300)", "KeyRange(mx.array([5]))", "mx.arange(L) > 3"]
)
@pytest.mark.parametrize(
    "length", [2048, pytest.param(8192, marks=pytest.mark.nightly("twice as long is linear, too"))]
)
def test_extra_memory_is_the_outputs(length, mask):
    measured = json.loads(python(PRINT_PEAK + PREFILL.format(length=length, mask=mask)).stdout)
    tensors = measured["out"] * (4 + 1 / 64)  # query, key, value, out and lse
    # Scores alone would take 4 * L * L * 4 bytes: 67 MB at 2048. out takes a quarter of `tensors`.
    assert measured["extra"] <= 0.3 * tensors + 2e6


DECODE = """
batch, heads, kv_heads, length, keys, dim = {shape}
query = mx.random.normal((batch, heads, length, 16)).astype(mx.bfloat16)
key, value = (mx.random.normal((batch, kv_heads, 1, d)).astype(mx.bfloat16) for d in (16, dim))

def attention(keys):  # all keys are one key, broadcast
    return flash_attention(query, *(mx.broadcast_to(x, (*x.shape[:2], keys, x.shape[3])) for x in (key, value)))

mx.eval(query, key, value, attention(600))  # makes the threads and their scratch
print_peak(lambda: attention(keys))
assert plan(query, query, query, device="cpu").kernel == "cpu_decode"
"""


@promise("a decode step keeps only a few partial results")
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize(
    "shape",  # batch, heads, key/value heads, queries, keys, head_dim of values
    [
        pytest.param((1, 64, 1, 8, 40_000, 512), id="many rows of large heads"),
        pytest.param((1, 28, 4, 8, 80_000, 128), id="many keys"),
        pytest.param((64, 32, 8, 4, 2048, 128), id="many heads"),
        pytest.param((1, 28, 4, 1, 1 << 20, 128), id="one query"),
    ],
)
def test_a_decode_step_keeps_the_results_of_a_few_runs_of_keys(shape):
    batch, heads, kv_heads, length, keys, dim = shape
    threads = 2
    measured = json.loads(python(PRINT_PEAK + DECODE.format(shape=shape), FLASHATTN_NUM_THREADS=str(threads)).stdout)
    run = heads // kv_heads * length * (dim + 2) * 4
    kept = max(2 << 20, (4 * threads + 1) * run)
    assert batch * kv_heads * keys // 512 * run > 3 * kept + 3e6  # the results of all splits would exceed the limit
    assert measured["extra"] <= kept + 1.2 * measured["out"] + 2e6


GROWTH = """
import json, mlx.core as mx
from flashattn_core import flash_attention, plan, quantized_flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree
from tests.memory import held

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

run(100)
before = held()
run({rounds})
print(json.dumps({name: number - before[name] for name, number in held().items()}))
"""


@promise("calls and gradients leave no memory, threads or files behind")
@pytest.mark.skipif("sys.platform != 'linux'", reason="/proc; run this test on Linux")
def test_nothing_grows(everything):
    """Runs 10,000 calls; 100,000 with --all."""
    grown = json.loads(python(GROWTH.replace("{rounds}", "10_000" if everything else "1000")).stdout)
    assert grown.pop("resident") < 1 << 19  # less than 53 bytes for each of 10,000 calls
    assert grown == {"active": 0, "cache": 0, "threads": 0, "files": 0}


# This code runs in one thread. With several, the amount of scratch memory depends on which threads took part in a call.
IN_ONE_THREAD = """
import flashattn_core, mlx.core as mx

def call(dim):
    x = mx.ones((1, 2, 200, dim))
    mx.eval(flashattn_core.flash_attention(x, x, x))

def gradient(dim):
    x = mx.ones((1, 2, 200, dim))
    mx.eval(mx.grad(lambda y: flashattn_core.flash_attention(y, x, x).sum())(x))

assert flashattn_core.release_scratch() == 0
for work in (call, gradient):
    needed = {}
    for dim in (32, 256, 32):
        work(dim)
        needed.setdefault(dim, set()).add(flashattn_core.release_scratch())
        assert flashattn_core.release_scratch() == 0
    [small], [large] = needed[32], needed[256]
    assert 0 < 4 * small < large, (small, large)
"""
IN_A_FORKED_CHILD = """
import os, flashattn_core, mlx.core as mx

x = mx.ones((1, 2, 200, 32))
mx.eval(flashattn_core.flash_attention(x, x, x))
child = os.fork()
if child == 0:
    os._exit(flashattn_core.release_scratch() != 0)
assert os.waitpid(child, 0)[1] == 0
assert flashattn_core.release_scratch() > 0
"""


def test_scratch_is_what_the_calls_since_the_last_release_needed():
    """Scratch memory must depend only on the calls since the last release."""
    python(IN_ONE_THREAD, FLASHATTN_NUM_THREADS="1")


def test_a_forked_child_forgets_its_parents_scratch():
    python(IN_A_FORKED_CHILD)


@promise("forward and backward take memory linear in L, as docs/training.md accounts for it")
@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [4096, 8192, pytest.param(32768, marks=pytest.mark.nightly("a minute"))])
def test_forward_and_backward(length, dtype):
    """The call must allocate no array beyond those that docs/training.md names.

    At 8k one array of all scores would take 268 MB, at 32k 4.3 GB.
    """
    call = Call(length, heads=1, kv_heads=1, dtype=dtype)
    extra, scratch = peak_extra(call)
    # Allows for the threads' scratch and for memory that the process itself takes.
    slack = 0.01 * call.needed + 1.5e6 + scratch
    assert 0.95 * call.needed <= extra <= call.needed + slack
    if length >= 8192:  # in such long calls, memory that does not grow with the length hardly counts
        assert extra - scratch < (1.2 if dtype == "float32" else 1.6) * call.held
