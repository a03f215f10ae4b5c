"""What the patch adds to a decode step's call, in microseconds: `uv run python tests/patch/overhead.py`.

Each call builds a lazy array and computes nothing. The routed function calls flash_attention(), mlx-lm's own calls
mx.fast.scaled_dot_product_attention(): the route alone is what the first adds to its kernel's call, the patch in all
what a model's call costs more than without it. A call that is left, with when="faster", costs more than mlx-lm's own.
"""

import statistics
import time

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
from flashattn_core.tuned import Call, Measured
from mlx_lm.models import base
from mlxlm_flash_patch import faster

ROUNDS, CALLS = 200, 200
OWN = "mlx-lm's own"


def main() -> None:
    q, k = mx.random.normal((1, 14, 1, 64)), mx.random.normal((1, 2, 512, 64))
    mx.eval(q, k)
    own = base.scaled_dot_product_attention
    flash.enable(strict=True)
    routed = base.scaled_dot_product_attention
    calls = {
        "routed": lambda: routed(q, k, k, None, 0.125, None),
        "flash_attention": lambda: flashattn_core.flash_attention(q, k, k, 0.125, None, sinks=None),
        OWN: lambda: own(q, k, k, None, 0.125, None),
        "when=faster's look-up": lambda: faster.reason_to_leave(q, k, k, None, None),
        "mx.fast": lambda: mx.fast.scaled_dot_product_attention(q, k, k, scale=0.125, mask=None, sinks=None),
    }
    median = medians(calls)
    routed(q, k, k, None, 0.125, None).tolist()  # or strict has something to say
    flash.disable()
    call = Call("float32", 14, 2, 64, 1, 512)
    faster._table = lambda: [Measured(call, {"mlx": 1.0, "cpu_decode": 2.0}, {"mlx": 0, "cpu_decode": 0})]
    with flash.enabled(when="faster"):
        left = base.scaled_dot_product_attention
        both = {"left": lambda: left(q, k, k, None, 0.125, None), OWN: calls[OWN]}
        of_left = medians(both)
    for name, microseconds in median.items():
        print(f"{name:24}{microseconds:7.2f} µs")
    for what, less in {"the route alone": "flash_attention", "the patch in all": OWN}.items():
        print(f"{what:24}{median['routed'] - median[less]:7.2f} µs")
    print(f"{'a call that is left':24}{of_left['left'] - of_left[OWN]:7.2f} µs")


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
