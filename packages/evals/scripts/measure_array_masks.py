"""Measures attention with masks that are arrays, with descriptions of the same masks, with no mask, and FlexAttention.

    uv run packages/evals/scripts/measure_array_masks.py cpu
    python packages/evals/scripts/measure_array_masks.py cuda [--only WORDS]

All contestants of a row take turns, and each number is a median. The first use of an array computes its block map.
Later uses share the map. FlexAttention is PyTorch's, compiled, with a block mask made beforehand. Its column is empty
where PyTorch is missing or can't compile the row. PyTorch's threads spin after a call and slow the next contestant
down. To prevent this, set OMP_WAIT_POLICY=passive.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, Mask, SlidingWindow

PADDING = (0, 37, 120, 256, 411, 600, 900, 1023)
SHORTEST, LONGEST = 100, 900  # lengths of the documents, in tokens
Time = Callable[[int], float]


class Case:
    """A mask as an array and, if flashattn_core.masks can express it, as a Mask."""

    def __init__(self, name: str, shown: np.ndarray, described: Mask | None = None, batch: int = 1) -> None:
        self.name, self.shown, self.described, self.batch = name, shown, described, batch


def cases(length: int) -> list[Case]:
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    random = np.random.default_rng(0)
    causal = key <= query
    bounds = np.cumsum(random.integers(SHORTEST, LONGEST, length // SHORTEST))
    document = np.searchsorted(bounds, np.arange(length), side="right")
    padding = np.array(PADDING)[:, None, None, None] * length // 2048
    return [
        Case("window 512", causal & (query - key < 512), SlidingWindow(512)),
        Case("window 128", causal & (query - key < 128), SlidingWindow(128)),
        Case("causal", causal, Causal()),
        Case("left padding of 8", causal & (key >= padding), Causal() & KeyRange(mx.array(padding.ravel())), 8),
        Case("documents", document[:, None] == document[None]),
        Case("prefix whose tokens see each other", causal | (key < length // 4)),
        Case("all True", np.ones((length, length), bool)),
        Case("random holes of 10 %", random.random((length, length)) > 0.1),
    ]


def evaluated(*arrays: Any) -> None:
    mx.eval(*arrays)


def times(contestants: dict[str, Time], trials: int, repeats: int) -> dict[str, float]:
    """Runs the contestants in turns, `repeats` calls at a time. Returns each one's median seconds per call."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(trials):
        for name, run in contestants.items():
            taken[name].append(run(repeats))
    return {name: median(each) for name, each in taken.items()}


def contestants_of(
    case: Case, tensors: Sequence[mx.array], mask: mx.array, gradient: bool, options: Any
) -> dict[str, Time]:
    def attend(q: mx.array, k: mx.array, v: mx.array, mask: Any) -> mx.array:
        return flash_attention(q, k, v, mask=mask, **options)

    differentiated = mx.vjp

    def call(mask: Any) -> Any:
        if not gradient:
            return attend(*tensors[:3], mask)
        return differentiated(lambda q, k, v: attend(q, k, v, mask), list(tensors[:3]), [tensors[3]])[1]

    def repeated(mask: Any) -> Time:
        def run(repeats: int) -> float:
            begin = perf_counter()
            evaluated(*[call(mask) for _ in range(repeats)])
            return (perf_counter() - begin) / repeats

        return run

    def first(repeats: int) -> float:
        fresh = [mx.where(mask == mask, mask, mask) for _ in range(repeats)]  # new arrays, which have no block map yet
        evaluated(*fresh)
        begin = perf_counter()
        evaluated(*[call(each) for each in fresh])
        return (perf_counter() - begin) / repeats

    result = {"array": repeated(mask), "first": first, "none": repeated(None)}
    if case.described is not None:
        result["described"] = repeated(case.described)
    return result


def flex(case: Case, tensors: Sequence[mx.array], device: str, gradient: bool) -> Time | None:
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return None
    if device == "cuda" and not torch.cuda.is_available():
        return None
    dtype = torch.bfloat16 if tensors[0].dtype == mx.bfloat16 else torch.float32
    query, key, value, cotangent = (
        torch.from_numpy(np.array(x.astype(mx.float32))).to(device=device, dtype=dtype) for x in tensors
    )
    shown = torch.from_numpy(np.broadcast_to(case.shown, (case.batch, 1, *case.shown.shape[-2:])).copy()).to(device)
    batch = shown.shape[0]

    def sees(b: Any, _head: Any, i: Any, j: Any) -> Any:
        return shown[b, 0, i, j]

    block_mask = create_block_mask(sees, batch, None, shown.shape[-2], shown.shape[-1], device=device)
    attend = torch.compile(flex_attention)
    for tensor in (query, key, value):
        tensor.requires_grad_(gradient)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def run(repeats: int) -> float:
        wait()
        begin = perf_counter()
        for _ in range(repeats):
            out = attend(query, key, value, block_mask=block_mask, enable_gqa=True)
            if gradient:
                out.backward(cotangent)
        wait()
        return (perf_counter() - begin) / repeats

    try:
        run(1)  # compiles
    except RuntimeError as error:  # on the CPU PyTorch 2.13 can't compile a batch's block mask or a gradient
        print(f"FlexAttention, {case.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return run


def row(case: Case, arguments: argparse.Namespace, gradient: bool) -> str:
    on_cpu = arguments.device == "cpu"
    heads, kv_heads, dim = (14, 2, 64) if on_cpu else (28, 4, 128)
    length, dtype = case.shown.shape[-1], mx.float32 if on_cpu else mx.bfloat16
    trials = arguments.trials
    draw = mx.random.split(mx.random.key(0), 4)
    shapes = [(case.batch, n, length, dim) for n in (heads, kv_heads, kv_heads, heads)]
    tensors = [mx.random.normal(shape, dtype, key=key) for shape, key in zip(shapes, draw, strict=True)]
    mask = mx.array(case.shown)
    mask = mask | mx.array(False)  # on CUDA, moves the mask from managed memory to the GPU's memory
    evaluated(tensors, mask)
    options = {} if on_cpu else {"precision": "input"}
    contestants = contestants_of(case, tensors, mask, gradient, options)
    for name, kind in (("additive", mx.where(mask, 0.0, -mx.inf).astype(dtype)),):
        evaluated(kind)
        contestants[name] = contestants_of(case, tensors, kind, gradient, options)["array"]
    theirs = flex(case, tensors, arguments.device, gradient) if arguments.flex else None
    if theirs:
        contestants["FlexAttention"] = theirs
    repeats = 1 if on_cpu else 10
    times(contestants, 1, repeats)  # a warm-up, which compiles the kernels
    got = times(contestants, trials, repeats)
    unit, scale = ("ms", 1e3) if on_cpu else ("µs", 1e6)
    base = got.get("described", got["none"])
    cells = [f"{case.name}{', forward and backward' if gradient else ''}"]
    for name in ("described", "none", "array", "first", "additive", "FlexAttention"):
        cells.append(f"{got[name] * scale:.4g} {unit}" if name in got else "")
    cells += [f"{got['array'] / base:.2f}", f"{got['first'] / base:.2f}", f"{got['array'] / got['none']:.2f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("--length", type=int, default=4096, help="queries and keys")
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--only", default="", help="rows whose name has these words")
    parser.add_argument("--pass", dest="passes", choices=["forward", "both"], default="both")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True, help="PyTorch's FlexAttention")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu if arguments.device == "cpu" else mx.gpu)
    columns = ("mask", "described", "no mask", "array", "first use", "additive", "FlexAttention")
    print("| " + " | ".join((*columns, "array / described", "first / described", "array / no mask")) + " |")
    print("|" + "---|" * 10)
    for gradient in (False, True)[: 1 + (arguments.passes == "both")]:
        for case in cases(arguments.length):
            if arguments.only in case.name:
                print(row(case, arguments, gradient), flush=True)


if __name__ == "__main__":
    main()
