"""What the patch adds to a decode step's call, in microseconds: `uv run python tests/patch/overhead.py`.

Each call builds a lazy array and computes nothing. The routed function calls flash_attention(), mlx-lm's own calls
mx.fast.scaled_dot_product_attention(): the route alone is what the first adds to its kernel's call, the patch in all
what a model's call costs more than without it.
"""

import statistics
import time

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
from mlx_lm.models import base
from mlxlm_flash_patch import faster

ROUNDS, CALLS = 200, 200


def main() -> None:
    q, k = mx.random.normal((1, 14, 1, 64)), mx.random.normal((1, 2, 512, 64))
    mx.eval(q, k)
    own = base.scaled_dot_product_attention
    flash.enable(strict=True)
    routed = base.scaled_dot_product_attention
    calls = {
        "routed": lambda: routed(q, k, k, None, 0.125, None),
        "flash_attention": lambda: flashattn_core.flash_attention(q, k, k, 0.125, None, sinks=None),
        "mlx-lm's own": lambda: own(q, k, k, None, 0.125, None),
        "when=faster's look-up": lambda: faster.reason_to_leave(q, k, k, None, None),
        "mx.fast": lambda: mx.fast.scaled_dot_product_attention(q, k, k, scale=0.125, mask=None, sinks=None),
    }
    took = {name: [] for name in calls}
    for _ in range(ROUNDS):  # in turns: whatever else the machine does, it does to all of them
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            took[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    routed(q, k, k, None, 0.125, None).tolist()  # or strict has something to say
    flash.disable()
    median = {name: statistics.median(times) for name, times in took.items()}
    for name, microseconds in median.items():
        print(f"{name:24}{microseconds:7.2f} µs")
    for what, less in {"the route alone": "flash_attention", "the patch in all": "mlx-lm's own"}.items():
        print(f"{what:24}{median['routed'] - median[less]:7.2f} µs")


if __name__ == "__main__":
    main()
