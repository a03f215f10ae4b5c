"""What the patch adds to a decode step's call, in microseconds: `uv run python tests/patch/overhead.py`.

Each call builds a lazy array and computes nothing. The routed function calls flash attention, mlx-lm's own calls
mx.fast.scaled_dot_product_attention(): the patch in all is what a model's call costs more than without it.
"""

import statistics
import time

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.models import base

ROUNDS, CALLS = 200, 200
OWN = "mlx-lm's own"


def main() -> None:
    q, k = mx.random.normal((1, 28, 1, 128), mx.bfloat16), mx.random.normal((1, 4, 512, 128), mx.bfloat16)
    mx.eval(q, k)
    own = base.scaled_dot_product_attention
    flash.enable(strict=True)
    routed = base.scaled_dot_product_attention
    calls = {
        "patched": lambda: routed(q, k, k, None, 0.125, None),
        "flash_attention": lambda: flashattn_core.flash_attention(q, k, k, 0.125, None, sinks=None),
        OWN: lambda: own(q, k, k, None, 0.125, None),
        "mx.fast": lambda: mx.fast.scaled_dot_product_attention(q, k, k, scale=0.125, mask=None, sinks=None),
    }
    for call in calls.values():
        mx.eval(call())  # decided and compiled by now
    for name, microseconds in medians(calls).items():
        print(f"{name:24}{microseconds:7.2f} µs")
    print(f"the patched call: {flash.status().counts()}")
    flash.disable()


def medians(calls):
    """Microseconds of one call of each."""
    took = {name: [] for name in calls}
    for _ in range(ROUNDS):  # in turns: whatever else the machine does, it does to all of them
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            took[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return {name: statistics.median(times) for name, times in took.items()}


if __name__ == "__main__":
    main()
