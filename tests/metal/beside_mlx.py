"""Counts operations and bytes of our kernels and MLX's. The command below prints the tables of docs/dev/metal.md.

MLX has no kernel for the gradient. So our kernels are compared with the least work that seven matrix products need.

    uv run python -m tests.metal.beside_mlx [float32|float16|bfloat16]

A call has one key/value head of Qwen2 and the query heads that share it, because every other key/value head costs the
same.
"""

import dataclasses
import functools
import operator
import sys

import mlx.core as mx
import numpy as np

from tests.core.gradient_oracle import draw_call
from tests.core.oracle import draw
from tests.emulators.metal_on_cpu import Counts
from tests.metal import mlx_kernels
from tests.metal.metal_attention import run
from tests.metal.metal_backward import run as run_backward

HEAD_DIMS = {"Qwen2-0.5B": 64, "Qwen2-7B": 128}
GROUP = 7  # query heads per key/value head, in both models


def total(counts: tuple[Counts, ...]) -> Counts:
    return functools.reduce(operator.add, counts)


def prefill(rng: np.random.Generator, dim: int, dtype: str, length: int, causal: bool) -> dict[str, Counts]:
    """Counts for one query head. In our kernel and in MLX's, a threadgroup works on a single query head."""
    arrays = draw(rng, heads=1, kv_heads=1, length=length, key_len=length, dim=dim, dtype=dtype)
    mask = "causal" if causal else None
    _, theirs = mlx_kernels.steel_attention(*arrays, mask=mask)
    return {"ours": total(run(*arrays, mask=mask).counts), "steel_attention": theirs}


def decode(rng: np.random.Generator, dim: int, dtype: str, key_len: int) -> dict[str, Counts]:
    """Counts what our kernel and MLX's kernels do for one query of each head of a group."""
    arrays = draw(rng, heads=GROUP, kv_heads=1, length=1, key_len=key_len, dim=dim, dtype=dtype)
    result = {"ours": total(run(*arrays).counts)}
    _, result["sdpa_vector"] = mlx_kernels.sdpa_vector(*arrays)
    if key_len >= 1024:  # MLX then chooses this kernel on the larger GPUs
        _, result["sdpa_vector_2pass"] = mlx_kernels.sdpa_vector_2pass(*arrays, blocks=64)
    return result


def visible_eighths(length: int, tile: int = 8) -> int:
    """Counts the 8 x 8 blocks that a causal mask shows, if queries see a whole tile of `tile` keys or nothing of it."""
    return sum((row + 8 + tile - 1) // tile * tile // 8 for row in range(0, length, 8))


def gradient(rng: np.random.Generator, dim: int, dtype: str, length: int) -> dict[str, Counts]:
    """Counts for a group of query heads under a causal mask.

    "least": the work of a kernel that multiplies visible blocks only, and accesses each array once.
    """
    sizes = {"length": length, "key_len": length, "dim": dim, "dtype": dtype}
    call = dataclasses.replace(draw_call(rng, heads=GROUP, kv_heads=1, dlse=False, **sizes), mask="causal")
    rows, pairs = GROUP * length, GROUP * visible_eighths(length)
    least = Counts(
        mma=7 * pairs * dim // 8,
        device_read=3 * call.query.nbytes + 2 * call.key.nbytes + 2 * 4 * rows,  # includes out, dout, lse and delta
        device_written=call.query.nbytes + 2 * call.key.nbytes + 4 * rows,
    )
    return {**run_backward(call).counts, "least": least}


def line(case: str, kernel: str, counts: Counts) -> str:
    device = (counts.device_read + counts.device_written) / 1024
    threadgroup = (counts.threadgroup_read + counts.threadgroup_written) / 1024
    operations = counts.shuffles + counts.reductions
    numbers = [counts.mma, device, threadgroup, counts.barriers, operations, counts.transcendentals]
    return " | ".join([f"| {case}", kernel, *(f"{number:,.0f}" for number in numbers)]) + " |"


def print_head() -> None:
    print("\n| case | kernel | 8x8 MMAs | device KB | threadgroup KB | barriers | SIMD operations | transcendentals |")
    print("|---|---|---|---|---|---|---|---|")


def main(dtype: str = "float16") -> None:
    print(dtype)
    print_head()
    rng = np.random.default_rng(0)
    for model, dim in HEAD_DIMS.items():
        for length in (256, 512):
            for causal in (True, False):
                case = f"{model}, prefill {length}{', causal' if causal else ''}"
                for kernel, counts in prefill(rng, dim, dtype, length, causal).items():
                    print(line(case, kernel, counts), flush=True)
        for key_len in (512, 2048):
            for kernel, counts in decode(rng, dim, dtype, key_len).items():
                print(line(f"{model}, decode {key_len:,}", kernel, counts), flush=True)
    print_head()
    for model, dim in HEAD_DIMS.items():
        for kernel, counts in gradient(rng, dim, dtype, 512).items():
            print(line(f"{model}, gradient 512, causal", kernel, counts), flush=True)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    main(*sys.argv[1:])
