"""Times a patched attention call of a decode step, in microseconds: `uv run python -m tests.patch.overhead`.

Each call builds a lazy array and computes nothing. The script times mlx-lm's and MLX's functions with the patch and
without it, and flashattn_core's function.
"""

import statistics
import time

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.models import base

ROUNDS, CALLS = 200, 200


def main() -> None:
    q, k = mx.random.normal((1, 28, 1, 128), mx.bfloat16), mx.random.normal((1, 4, 512, 128), mx.bfloat16)
    mx.eval(q, k)
    calls = {
        "mlx-lm's": lambda: base.scaled_dot_product_attention(q, k, k, None, 0.125, None),
        "mx.fast's": lambda: mx.fast.scaled_dot_product_attention(q, k, k, scale=0.125, mask=None, sinks=None),
    }
    flash_attention = {"flash_attention": lambda: flashattn_core.flash_attention(q, k, k, 0.125, None, sinks=None)}
    took: dict[str, list[float]] = {}
    for _ in range(ROUNDS):  # the calls take turns, so that other programs slow all of them alike
        for name, call in calls.items():
            took.setdefault(f"{name}, unpatched", []).append(microseconds(call))
        with flash.enabled(strict=True):
            for call in calls.values():
                mx.eval(call())  # chooses and compiles the kernel
            for name, call in (calls | flash_attention).items():
                took.setdefault(f"{name}, patched" if name in calls else name, []).append(microseconds(call))
    for name, times in took.items():
        print(f"{name:24}{statistics.median(times):7.2f} µs")


def microseconds(call):
    """The mean time of one call."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


if __name__ == "__main__":
    main()
