"""The kernels need as many operations and bytes as docs/dev/metal.md says, and no more than MLX's own kernels.

Calls have one key/value head of Qwen2 and the query heads that share it, because every other key/value head costs the
same.
"""

import dataclasses
import functools
import operator
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.masks import KeyRange, SlidingWindow

from tests.core.gradient_oracle import draw_call
from tests.core.oracle import DTYPES, draw
from tests.emulators.metal_on_cpu import Counts
from tests.metal.metal_attention import run
from tests.metal.metal_backward import run as run_backward
from tests.promises import promise

PAGE = Path(__file__).parents[2] / "docs/dev/metal.md"
HEAD_DIMS = {"Qwen2-0.5B": 64, "Qwen2-7B": 128}
GROUP = 7  # query heads per key/value head, in both models


def total(counts: tuple[Counts, ...]) -> Counts:
    return functools.reduce(operator.add, counts)


def visible_eighths(length: int, tile: int = 8) -> int:
    """Counts the 8 x 8 blocks that a causal mask shows, if queries see a whole tile of `tile` keys or nothing of it."""
    return sum((row + 8 + tile - 1) // tile * tile // 8 for row in range(0, length, 8))


def rows(work: str) -> dict[str, list[tuple[int, int]]]:
    """Maps each case of the page's table of prefills or decode steps to its columns: (our count, MLX's count)."""
    found = re.findall(rf"^\| (Qwen2-\S+, {work} .*?) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    numbers = {case: re.findall(r"([\d,]+) \(([\d,]+)\)", cells) for case, cells in found}
    return {case: [(number(a), number(b)) for a, b in columns] for case, columns in numbers.items()}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def assert_is_the_pages(counts: Counts, columns: list[tuple[int, int]]) -> None:
    """Compares six counts with the page's. The first four may be at most MLX's."""
    device = (counts.device_read + counts.device_written) / 1024
    threadgroup = (counts.threadgroup_read + counts.threadgroup_written) / 1024
    ours, mlxs = zip(*columns, strict=True)
    operations = counts.shuffles + counts.reductions
    assert ours == (counts.mma, round(device), round(threadgroup), counts.barriers, operations, counts.transcendentals)
    assert all(own <= other for own, other in zip(ours[:4], mlxs, strict=False))


@promise("Metal's prefill needs no more matrix products, bytes and barriers than MLX's own")
@pytest.mark.rotate(2)
@pytest.mark.parametrize("case", rows("prefill"))
def test_prefill(rng, case):
    """Counts one query head, because a threadgroup works on a single query head."""
    model, work, mask = case.split(", ")
    length = number(work.removeprefix("prefill "))
    arrays = draw(rng, heads=1, kv_heads=1, length=length, key_len=length, dim=HEAD_DIMS[model], dtype="float16")
    assert_is_the_pages(total(run(*arrays, mask=mask).counts), rows("prefill")[case])


@promise("Metal's decode step needs no more bytes and barriers than MLX's own")
@pytest.mark.rotate(3)
@pytest.mark.parametrize("case", rows("decode"))
def test_decode(rng, case):
    model, work, *_ = case.split(", ")
    sizes = {"heads": GROUP, "kv_heads": 1, "length": 1, "key_len": number(work.removeprefix("decode "))}
    arrays = draw(rng, **sizes, dim=HEAD_DIMS[model], dtype="float16")
    assert_is_the_pages(total(run(*arrays).counts), rows("decode")[case])


ONE_QUERY = [(f"metal_decode_{name}", 1) for name in ("fast", "parallel", "split")]
EIGHT_QUERIES = [(f"metal_{name}", 8) for name in ("decode_split", "prefill_tg", "prefill_reg", "rowwise")]
MASKS = {  # pairs of a mask and the number of keys that each query sees
    "window": (SlidingWindow(20), 20),
    "key range": (KeyRange(100, 140), 40),
    "window and range": (SlidingWindow(50) & KeyRange(0, 480), 30),
}


@pytest.mark.rotate(10)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("kernel", "length"), ONE_QUERY + EIGHT_QUERIES)
def test_hidden_tiles_are_not_read(rng, kernel, length, mask):
    query, key, value = draw(rng, heads=1, kv_heads=1, length=length, key_len=500, dim=64)
    described, seen = MASKS[mask]
    counts = total(run(query, key, value, mask=described, kernel=kernel).counts)
    # A kernel may read the keys that some query sees, and the rest of their tiles. Each of 32 SIMD groups may read all
    # queries and the bounds of each query's keys. Partial results may be read once.
    keys = seen + length - 1 + (64 if kernel == "metal_prefill_reg" else 0)
    assert counts.device_read <= 2 * keys * 64 * 4 + 32 * (query.nbytes + 2 * 4 * 32) + counts.device_written
    assert counts.device_read < (key.nbytes + value.nbytes) / 2


def test_fully_visible_tiles_read_no_mask(rng):
    # Under a causal mask, only tiles on the diagonal compare positions or read the array.
    query, key, value = draw(rng, heads=1, kv_heads=1, length=256, key_len=256, dim=64)
    plain = run(query, key, value, mask="causal").counts[0]
    array = run(query, key, value, mask=mx.array(np.tri(256, dtype=bool))).counts[0]
    assert array.device_read < plain.device_read + 256 * 256
    everywhere = run(query, key, value, mask=mx.array(np.arange(256) % 32 > 0)).counts[0]
    assert everywhere.device_read > plain.device_read + 256 * 256


@pytest.mark.rotate(3)
@pytest.mark.parametrize("dtype", [mx.bool_, mx.float32], ids=str)
@pytest.mark.parametrize("kernel", ["metal_prefill_tg", "metal_prefill_reg", "metal_rowwise"])
def test_hidden_blocks_of_an_array_are_not_read(rng, kernel, dtype):
    """Queries see keys in only 3 of 15 blocks of 32 keys. Mask, keys and values of other blocks must not be read."""
    query, key, value = draw(rng, heads=1, kv_heads=1, length=32, key_len=480, dim=64)
    shown = (mx.arange(480) >= 70) & (mx.arange(480) < 130)
    mask = mx.broadcast_to(shown if dtype == mx.bool_ else mx.where(shown, 0.0, -mx.inf), (32, 480))
    counts = total(run(query, key, value, mask=mask, kernel=kernel).counts)
    tiles = {"metal_prefill_tg": 4, "metal_prefill_reg": 1, "metal_rowwise": 1}[kernel]  # tiles that 32 queries fill
    of_blocks = 96 * (2 * 64 * 4 * tiles + 32 * mask.itemsize)
    assert counts.device_read <= of_blocks + tiles * query.nbytes * 4 + 15 * 32 * 32 * 8
    assert counts.device_read < (key.nbytes + value.nbytes) * tiles / 2


# --- The gradient ----------------------------------------------------------------------------------------


@pytest.mark.rotate(4)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dim", HEAD_DIMS.values())
def test_gradient_beside_seven_products(rng, dim, dtype):
    """dk, dv and dq must be summed over visible 8 x 8 blocks only. Scores and dP are computed for whole tiles."""
    sizes = {"length": 512, "key_len": 512, "dim": dim, "dtype": dtype}
    call = dataclasses.replace(draw_call(rng, heads=GROUP, kv_heads=1, dlse=False, **sizes), mask="causal")
    counts = run_backward(call).counts
    products = {kernel: each.mma * 8 // dim // GROUP for kernel, each in counts.items()}
    rows = 16 if dtype == "float32" and dim == 128 else 32  # rows in a tile of queries: fewer if rows are large
    one, of_keys, of_rows = visible_eighths(512), visible_eighths(512, 32), visible_eighths(512, rows)
    assert products == {"backward_delta": 0, "backward_dq": 2 * of_keys + one, "backward_dkv": 2 * of_rows + 2 * one}
    assert sum(products.values()) <= 1.03 * 7 * one
    # There are no atomics: every element of every result is written once.
    written = call.query.nbytes + 2 * call.key.nbytes + 4 * GROUP * 512
    assert sum(each.device_written for each in counts.values()) == written


@pytest.mark.rotate(4)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_gradient_keeps_in_threadgroup_memory(rng, dtype, dim):
    # The kernel for dq loads keys and values. The kernel for dk and dv loads query, dout, maximum, sum and delta of all
    # rows of all heads in the group.
    length, key_len = 128, 192
    call = draw_call(rng, heads=GROUP, kv_heads=1, length=length, key_len=key_len, dim=dim, dtype=dtype)
    counts = run_backward(call).counts
    dq, dkv = counts["backward_dq"], counts["backward_dkv"]
    row_tiles, key_tiles, rows = GROUP * length // 64, key_len // 64, 16 if dtype == "float32" and dim == 128 else 32
    assert dq.threadgroup_written == row_tiles * (call.key.nbytes + call.value.nbytes)
    assert dkv.threadgroup_written == key_tiles * (call.query.nbytes + call.dout.nbytes + 3 * 4 * GROUP * length)
    assert dq.barriers == row_tiles * 4 * key_len // 32
    assert dkv.barriers == key_tiles * 2 * GROUP * length // rows
    assert counts["backward_delta"].threadgroup_written == counts["backward_delta"].barriers == 0
