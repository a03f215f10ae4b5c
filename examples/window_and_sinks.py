"""The op by itself: attention with a sliding window and sinks, its gradient, and the memory of both.

Run it: uv run examples/window_and_sinks.py
"""

import mlx.core as mx
from flash_evals.work.measure import peak_memory
from flashattn_core import flash_attention
from flashattn_core.masks import KeyRange, SlidingWindow

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM, WINDOW = 2, 8, 2, 4096, 64, 128

mx.random.seed(0)
query = mx.random.normal((BATCH, HEADS, LENGTH, HEAD_DIM))
key = mx.random.normal((BATCH, KV_HEADS, LENGTH, HEAD_DIM))  # each key head serves four query heads
value = mx.random.normal((BATCH, KV_HEADS, LENGTH, HEAD_DIM))
sinks = mx.zeros(HEADS)  # one extra logit per head: it takes a share of the softmax and has no value row
mx.eval(query, key, value, sinks)

# Masks are descriptions, and `&` combines them: a query sees itself and the 127 keys before it, and no padding.
# The second sequence of this batch has 100 tokens of padding on the left.
mask = SlidingWindow(WINDOW) & KeyRange(start=mx.array([0, 100]))


def attend(query, key, value, sinks):
    return flash_attention(query, key, value, mask=mask, sinks=sinks)


def loss(*inputs):
    return attend(*inputs).square().sum()


with peak_memory() as peak:
    out = attend(query, key, value, sinks)
    mx.eval(out)
    forward = peak()
print(f"output {out.shape}; a query that sees only padding gives {out[1, 0, 50].abs().max().item()}")

with peak_memory() as peak:
    gradients = mx.grad(loss, argnums=(0, 1, 2, 3))(query, key, value, sinks)
    mx.eval(gradients)
    backward = peak()
print("gradients of query, key, value and sinks:", *(gradient.shape for gradient in gradients))

matrix = BATCH * HEADS * LENGTH * LENGTH * 4
print(f"memory: {forward / 1e6:.0f} MB forward, {backward / 1e6:.0f} MB forward and backward")
print(f"the score matrix, which is never made, would take {matrix / 1e6:,.0f} MB")
