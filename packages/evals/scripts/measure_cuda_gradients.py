"""Measures the table of gradients in docs/nvidia.md on this machine's NVIDIA GPU: attention as training calls it.

    MLX_ENABLE_TF32=0 python packages/evals/scripts/measure_cuda_gradients.py

MLX's own attention and flash attention take turns. "backward" times only the backward pass, because the forward pass is
evaluated before the clock starts. "forward and backward" times `mx.vjp`, as `mx.grad` calls it.
"""

import sys
from collections.abc import Sequence
from functools import partial
from timeit import timeit

import mlx.core as mx
import numpy as np
from flash_evals.work import machine
from flash_evals.work.measure import peak_memory
from measure_cuda_table import Attention, Call, call, in_turns, mlx_own, ours

TRIALS = 11
# One evaluation computes AT_ONCE passes, to spread the host's fixed time per evaluation over them. It computes only
# FEW_AT_ONCE passes if each needs a gigabyte or more.
AT_ONCE, FEW_AT_ONCE = 16, 4
LARGEST_CHECKED = 4096  # queries; for longer calls, exact gradients would take too long, so no errors are computed

TABLE = {
    "causal, 28/4x128, 4096²": call("28/4x128", 4096, 4096),
    "causal, batch of 4, 14/2x64, 2080²": call("14/2x64", 2080, 2080, batch=4),
    "window 512, 28/4x128, 4096²": call("28/4x128", 4096, 4096, window=512),
    "window 1024, 8/4x256, 8192²": call("8/4x256", 8192, 8192, window=1024),
    "causal, 28/4x128, 16384²": call("28/4x128", 16384, 16384),
    "causal, 32/8x128, 8192²": call("32/8x128", 8192, 8192),
    "float32, causal, 28/4x128, 4096²": call("28/4x128", 4096, 4096, dtype="float32"),
    "window 128, sinks, 64/8x64, 4096²": call("64/8x64", 4096, 4096, window=128, sinks=True),
    "causal, 8/4x256, 4096²": call("8/4x256", 4096, 4096),
    "soft-cap 50, 8/4x256, 4096²": call("8/4x256", 4096, 4096, softcap=50.0),
}


def with_gradients(attend: Attention, inputs: Sequence[mx.array], cotangent: mx.array) -> list[mx.array]:
    outputs, gradients = mx.vjp(attend, list(inputs), [cotangent])
    return [*outputs, *gradients]


def backward_seconds(attend: Attention, inputs: Sequence[mx.array], cotangent: mx.array, count: int) -> float:
    """Seconds of one backward pass, when `count` passes are evaluated together."""
    all_of_them = [with_gradients(attend, inputs, cotangent) for _ in range(count)]
    mx.eval([each[0] for each in all_of_them])  # runs the forward passes; the gradients keep what they need of them
    gradients = [each[1:] for each in all_of_them]
    return timeit(partial(mx.eval, gradients), number=1) / count


def exact_gradients(call: Call, inputs: Sequence[np.ndarray], cotangent: np.ndarray) -> list[np.ndarray]:
    """Computes float64 gradients for one key head and its query heads. The query and the cotangent have the shape
    (heads, L, D), key and value have (S, D).
    """
    query, key, value = inputs
    scale = call.head_dim**-0.5
    seen = np.array(call.seen(mx.arange(call.query_len)))[0, 0]
    dqs, dk, dv = [], np.zeros_like(key), np.zeros_like(value)
    for q, dout in zip(query, cotangent, strict=True):
        scores = q @ key.T * scale
        capped = call.softcap * np.tanh(scores / call.softcap) if call.softcap else scores
        weights = np.exp(np.where(seen, capped, -np.inf) - capped.max())
        weights /= weights.sum(-1, keepdims=True)
        dweights = dout @ value.T
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
        if call.softcap:
            dscores *= 1 - (capped / call.softcap) ** 2
        dqs.append(dscores @ key * scale)
        dk += dscores.T @ q * scale
        dv += weights.T @ dout
    return [np.stack(dqs), dk, dv]


def errors(
    call: Call, inputs: Sequence[mx.array], cotangent: mx.array, gradients: Sequence[Sequence[mx.array]]
) -> list[list[float]]:
    """Returns the root mean square errors of dq, dk and dv. For a 16-bit dtype, each error is divided by the error of
    the exact gradient rounded to the dtype.
    """
    group = call.num_heads // call.num_kv_heads

    def exactly(array: mx.array, heads: slice | int) -> np.ndarray:
        return np.array(mx.contiguous(array[-1, heads]).astype(mx.float32), np.float64)

    parts = [slice(-group, None), -1, -1]
    exact = exact_gradients(call, list(map(exactly, inputs, parts)), exactly(cotangent, parts[0]))
    found = []
    for each in gradients:
        row = []
        for got, wanted, part in zip(each, exact, parts, strict=True):
            rounded = np.array(mx.array(wanted.astype(np.float32)).astype(got.dtype).astype(mx.float32))
            unit = 1 if call.dtype == "float32" else np.sqrt(np.mean((rounded - wanted) ** 2))
            row.append(float(np.sqrt(np.mean((exactly(got, part) - wanted) ** 2)) / unit))
        found.append(row)
    return found


def measured(call: Call, trials: int = TRIALS) -> dict[str, list]:
    """Measures MLX's own attention, and flash attention with precision float32 and input. The result has for each of
    them the seconds of the backward pass ("backward") and of both passes ("both"), the bytes that the passes take
    beyond their inputs ("memory"), and the errors of the gradients ("errors")."""
    query, key, value, sinks = call.draw(0)
    cotangent = mx.random.normal(query.shape, query.dtype, key=mx.random.key(1))
    inputs = [query, key, value]
    mx.eval(inputs, sinks, cotangent)
    contestants = {"MLX's own": mlx_own(call, sinks if call.sinks else None)}
    flash = ours(call, sinks if call.sinks else None)
    contestants |= {"float32": flash, "input": partial(flash, precision="input")}
    memory, gradients, ways = [], [], {}
    for who, attend in contestants.items():
        try:
            mx.eval(with_gradients(attend, inputs, cotangent))  # compiles the kernels
        except (RuntimeError, ValueError) as error:
            print(f"{who}: {error}", file=sys.stderr)
            continue
        with peak_memory() as peak:
            mx.eval(outputs := with_gradients(attend, inputs, cotangent))
            memory.append(float(peak()))
        gradients.append(outputs[1:])
        ways[who] = attend

    def both(attend: Attention, count: int) -> None:
        mx.eval([with_gradients(attend, inputs, cotangent) for _ in range(count)])

    at_once = AT_ONCE if max(memory) < 1e9 else FEW_AT_ONCE
    backward = {who: [] for who in ways}
    for _ in range(trials):
        for who, attend in ways.items():
            backward[who].append(backward_seconds(attend, inputs, cotangent, at_once))
    found = {
        "who": " and ".join(ways),
        "memory": memory,
        "backward": [sorted(t)[len(t) // 2] for t in backward.values()],
    }
    found["both"] = in_turns({who: partial(both, attend) for who, attend in ways.items()}, trials)
    checked = call.query_len <= LARGEST_CHECKED and not call.sinks
    found["errors"] = errors(call, inputs, cotangent, gradients) if checked else []
    return found


def main() -> None:
    if not mx.cuda.is_available():
        sys.exit("MLX finds no NVIDIA GPU: on a machine with one, pip install 'flashattn-core[cuda13]'")
    print(f"{machine.device()}: MLX's own / ours, precision float32 / ours, precision input\n")
    print("| call | backward, ms | forward and backward, ms | gain | memory, MB | errors |\n" + "|---" * 6 + "|")
    for name, each_call in TABLE.items():
        found = measured(each_call)
        both = found["both"]
        cells = [name, " / ".join(f"{t * 1e3:.3f}" for t in found["backward"])]
        cells += [
            " / ".join(f"{t * 1e3:.3f}" for t in both),
            " / ".join(f"{both[0] / each:.2f}x" for each in both[1:]) if len(both) == 3 else f"{found['who']} alone",
        ]
        cells += [" / ".join(f"{n / 1e6:,.0f}" for n in found["memory"])]
        cells += ["; ".join(" / ".join(f"{e:.3g}" for e in each) for each in found["errors"])]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
