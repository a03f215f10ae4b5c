"""The same bits for any number of threads, and run to run, forward and backward."""

import mlx.core as mx
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import KeyRange, SlidingWindow
from oracle import draw

PRINT_BITS = """
import hashlib, mlx.core as mx, numpy as np, flashattn_core
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
for length, key_len in [(1, 1), (1, 3000), (8, 1025), (33, 97), (200, 513), (700, 1500)]:
    for mask in [None, SlidingWindow(100), Causal() & KeyRange(mx.array([0, 7]))]:
        for heads, kv_heads in [(1, 1), (7, 1), (8, 2)]:
            q, k, v = (mx.array(rng.standard_normal((2, h, n, 40), dtype=np.float32))
                       for h, n in [(heads, length), (kv_heads, key_len), (kv_heads, key_len)])
            def attention(q, k, v):
                return flashattn_core.flash_attention(q, k, v, mask=mask, sinks=mx.zeros(heads), return_lse=True)
            outputs, gradients = mx.vjp(attention, [q, k, v], [q, q[..., 0]])
            print(hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in (*outputs, *gradients))).hexdigest())
print(flashattn_core.backends()["cpu"].split(", ")[1])
"""


def test_any_number_of_threads(run_python):
    runs = [run_python(PRINT_BITS, FLASHATTN_NUM_THREADS=n) for n in ("1", "2", "7")]
    assert [r.returncode for r in runs] == [0] * 3, runs[0].stderr
    lines = [r.stdout.splitlines() for r in runs]
    assert [text[-1] for text in lines] == ["1 thread", "2 threads", "7 threads"]
    assert len(lines[0]) == 55
    assert all(text[:-1] == lines[0][:-1] for text in lines)


@pytest.mark.parametrize(("length", "key_len"), [(1, 5000), (300, 300)])
@pytest.mark.parametrize("mask", [None, SlidingWindow(70), KeyRange(3, 290)], ids=str)
def test_run_to_run(rng, mask, length, key_len):
    query, key, value = draw(rng, heads=14, kv_heads=2, length=length, key_len=key_len, dim=64)
    first = flash_attention(query, key, value, mask=mask)
    assert all(mx.array_equal(first, flash_attention(query, key, value, mask=mask)) for _ in range(20))
