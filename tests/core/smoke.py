"""Calls everything that the extension offers, once or twice. A script: test_sanitizers.py runs it under a sanitizer.

`smoke.py overrun` writes past the end of one of MLX's arrays instead, which a sanitizer must report.
"""

import ctypes
import itertools
import sys

import mlx.core as mx
import numpy as np
from flashattn_core import flash_attention, plan, quantized_flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

mx.set_default_device(mx.cpu)


def inputs(query_len: int, key_len: int, dtype: mx.Dtype, dim: int = 64) -> list[mx.array]:
    shapes = [(2, 4, query_len, dim), (2, 2, key_len, dim), (2, 2, key_len, dim)]
    return [mx.random.normal(shape).astype(dtype) for shape in shapes]


def masks(query_len: int, key_len: int) -> list[object]:
    starts, stops = mx.array([0, 3]), mx.array([key_len, key_len - 1])
    tree = Tree.from_parents([-1, 0, 0])
    visible = mx.random.uniform(shape=(query_len, key_len)) > 0.3
    bias = mx.random.normal((2, 1, 1, key_len))
    return [None, Causal(), SlidingWindow(20), Causal() & KeyRange(starts, stops), Causal() & tree, visible, bias]


def forward_and_gradient() -> None:
    lengths, dtypes = [(1, 700), (5, 40), (40, 33)], [mx.float32, mx.float16, mx.bfloat16]
    for (query_len, key_len), dtype in itertools.product(lengths, dtypes):
        query, key, value = inputs(query_len, key_len, dtype)
        alibi = {"alibi_slopes": mx.ones(4), "return_lse": True}
        extras = [{}, {"softcap": 5.0}, {"sinks": mx.zeros(4, dtype=dtype)}, alibi]
        for mask, extra in itertools.product(masks(query_len, key_len), extras):
            if isinstance(mask, mx.array) and mask.dtype == mx.float32:
                mask = mask.astype(dtype)

            def call(query, key, value, mask=mask, extra=extra):
                out = flash_attention(query, key, value, mask=mask, **extra)
                return out[0] if "return_lse" in extra else out

            mx.eval(mx.vjp(call, [query, key, value], [mx.ones_like(query)]))


def quantised() -> None:
    for bits, group_size, query_len in [(8, 64, 1), (4, 32, 5), (3, 32, 40), (6, 64, 2)]:
        query, key, value = inputs(query_len, 70, mx.float32, dim=128)
        packed = [mx.quantize(x, group_size=group_size, bits=bits) for x in (key, value)]
        mx.eval(quantized_flash_attention(query, *packed, group_size=group_size, bits=bits, mask="causal"))


def transforms() -> None:
    query, key, value = inputs(9, 20, mx.float32)
    plan(query, key, value)
    mx.eval(mx.vmap(flash_attention)(query, key, value))
    mx.eval(mx.vmap(flash_attention, in_axes=(0, None, None))(query, key[0], value[0]))
    for shapeless in (False, True):
        compiled = mx.compile(flash_attention, shapeless=shapeless)
        mx.eval(compiled(query, key, value), compiled(query[..., :4, :], key, value))
    backwards = [x[..., ::-1, ::-2] for x in (query, key, value)]
    mx.eval(flash_attention(*backwards), flash_attention(query[:, :, :0], key, value))
    mx.eval(flash_attention(query, key[:, :, :0], value[:, :, :0]))


def errors() -> None:
    query, key, value = inputs(4, 4, mx.float32)
    refused = [
        lambda: flash_attention(query, key[:, :, :, :3], value),
        lambda: flash_attention(query, key, value, kernel="metal_rowwise"),
        lambda: mx.eval(flash_attention(query, key, value, scale=1e38, softcap=0.01)),
        lambda: mx.jvp(lambda x: flash_attention(x, key, value), [query], [query]),
        lambda: quantized_flash_attention(query, (key, key, key), (value, value, value)),
    ]
    for call in refused:
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("not refused")


def overrun() -> None:
    memory = np.asarray(memoryview(mx.zeros(1000)))
    ctypes.memset(memory.ctypes.data, 0, memory.nbytes + 64)


if __name__ == "__main__":
    if sys.argv[1:] == ["overrun"]:
        overrun()
    else:
        for part in (forward_and_gradient, quantised, transforms, errors):
            part()
            print(part.__name__)
