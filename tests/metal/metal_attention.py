"""Runs flash_attention() and quantized_flash_attention() with Metal's or CUDA's kernels, on the CPU.

The extension describes each launch: source text, function constants, grid, buffers with their strides and offsets. This
module runs the described launches in the emulator. On a Mac, Metal's kernels run on the GPU instead.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import flashattn_core
import mlx.core as mx
import numpy as np
from flashattn_core.arguments import lowered

from tests import launches
from tests.emulators.cuda_on_cpu import CudaProgram
from tests.emulators.metal_on_cpu import Counts, Program, Undefined, View
from tests.emulators.metal_on_cpu.program import Buffer

NUMPY_DTYPES = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16}
TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}  # these types' names in the kernels' text


program = functools.cache(Program)


def prepared(launch, source: str, device: str):
    """Returns a launch's compiled program, the indices of its buffers by name, and its function constants."""
    if device == "cuda":
        return CudaProgram(launch, source), {name: number for number, name in enumerate(launch["buffers"])}, {}
    return program(source), launch["numbers"], dict(enumerate(launch["constants"].values()))


@dataclass(frozen=True)
class Run:
    out: mx.array
    lse: mx.array
    row_stats: mx.array
    exact_out: mx.array | None
    counts: tuple[Counts, ...]  # one per launch
    chunks: int  # how many chunks of keys the kernel has

    @property
    def saved(self) -> tuple[mx.array, mx.array, mx.array]:
        """The results that the backward pass needs."""
        return self.out if self.exact_out is None else self.exact_out, self.lse, self.row_stats


def run(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    scale: float | None = None,
    mask=None,
    *,
    group_size: int = 64,
    bits: int | None = None,
    kernel: str = "auto",
    return_lse: bool = True,
    exact_out: bool = False,
    small_blocks: bool | None = None,
    schedule: str = "forward",
    edit=lambda source: source,
    device: str = "metal",
    **options,
) -> Run:
    """Runs one call. If `bits` is given, key and value are quantised, and each is a tuple (weights, scales, biases).

    Without `return_lse`, CUDA's kernels get no array for lse. With `exact_out`, the kernels write it, as in a traced
    call. `edit` changes the source before it is compiled, to plant a fault. `schedule` is the emulator's order of
    threads; a GPU ignores it. `small_blocks`: see launches.forward(). `options`: softcap, sinks, alibi_slopes.
    """
    if bits is not None:
        options |= {"group_size": group_size, "bits": bits}
    if device == "metal" and mx.metal.is_available():
        attention = flashattn_core.flash_attention if bits is None else flashattn_core.quantized_flash_attention
        call = {"return_lse": True, "kernel": kernel, "stream": mx.gpu, **options}
        return Run(*attention(query, key, value, scale, mask, **call), mx.zeros(0), None, (), 0)
    kernel, precision, gpu = launches.form(kernel)
    arguments = lowered(query, key, value, scale, mask, kernel=kernel, **precision, **options)
    value_dim = value.shape[-1] if bits is None else value[0].shape[-1] * 32 // bits
    rows = query.shape[:-1]
    if min(query.shape) == 0:  # on a GPU, eval_gpu() launches nothing either
        return Run(mx.zeros((*rows, value_dim), query.dtype), mx.zeros(rows), mx.zeros(0), None, (), 0)
    with_lse = return_lse or device == "metal"  # Metal's kernels always write lse
    with gpu:
        described = launches.forward(arguments, device, with_lse, exact_out, small_blocks)
    by_query = (*query.shape[:-3], query.shape[-2], query.shape[-3], value_dim)
    written: dict[str, Buffer] = {"out": Undefined(by_query, NUMPY_DTYPES[query.dtype])}
    if with_lse:
        written["lse"] = Undefined(rows, np.float32)
        written["row_stats"] = Undefined((*rows, 2), np.float32)
    if exact_out:
        written["exact_out"] = Undefined(by_query, np.float32)
    counts = execute(described, written, schedule, edit, device)
    out = to_mlx(written["out"], query.dtype).swapaxes(-3, -2)
    lse, row_stats = (mx.array(written.get(name, np.zeros(0))) for name in ("lse", "row_stats"))
    exact = mx.array(written["exact_out"]).swapaxes(-3, -2) if exact_out else None
    return Run(out, lse, row_stats, exact, counts, described[0]["split"][2])


def execute(described, written: dict[str, Buffer], schedule: str, edit, device: str) -> tuple[Counts, ...]:
    """Runs the described launches. Stores their results and scratch arrays in `written`.

    If several launches write one output, no two may write the same element. Arrays in `written` are overwritten.
    """
    counts = []
    overwritten = {name for name, buffer in written.items() if isinstance(buffer, np.ndarray)}
    writers = Counter(name for launch in described for name in launch["outputs"] if name not in launch["scratch"])
    in_part = {name: undefined for name, undefined in written.items() if writers[name] > 1}
    parts: dict[str, np.ndarray] = {}
    elements: Counter[str] = Counter()
    for launch in described:
        buffers: dict[str, Buffer] = {}
        for name, content in launch["buffers"].items():
            if isinstance(content, bytes):  # a struct
                buffers[name] = content
            elif isinstance(content, tuple):
                memory, offset = content
                buffers[name] = View(np.frombuffer(memory, np.uint8), offset)
            elif name == "arrivals":  # counters, which are 0 between launches
                buffers[name] = np.zeros(content // 4, np.uint32)
            else:  # an array of `content` bytes that the launches write
                buffers[name] = written.setdefault(name, Undefined(content // 4, np.float32))
        assert min(launch["grid"]) > 0, "no GPU takes a launch without blocks"
        program, numbers, constants = prepared(launch, edit(launch["source"]), device)
        result = program.run(
            launch["function"],
            grid=launch["grid"],
            threadgroup=launch["threadgroup"],
            buffers={numbers[name]: buffer for name, buffer in buffers.items()},
            outputs={
                numbers[name]
                for name, buffer in buffers.items()
                if isinstance(buffer, Undefined) or name in overwritten or name == "arrivals"
            },
            constants=constants,
            schedule=schedule,
        )
        names = {number: name for name, number in numbers.items()}
        for number, array in result.buffers.items():
            name, missing = names[number], result.unwritten[number]
            if name in in_part:
                elements[name] += array.size - missing
                bits = array.view(f"u{array.itemsize}")
                parts[name] = parts[name] & bits if name in parts else bits  # unwritten elements have all bits set
            else:
                assert missing == 0 or name in overwritten, f"elements of {name} never written: {missing}"
                written[name] = array
        assert not np.any(written.pop("arrivals", 0)), "arrivals that the next launch would count, too"
        counts.append(result.counts)
    for name, array in parts.items():
        assert elements[name] == array.size, f"{name} is written {elements[name]} times, has {array.size} elements"
        written[name] = array.view(in_part[name].dtype)
    return tuple(counts)


def to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(dtype)


def as_numpy(array: mx.array) -> np.ndarray:
    """Converts to numpy: bfloat16, which numpy lacks, becomes uint16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def flash_attention(query, key, value, scale=None, mask=None, *, return_lse=False, **options):
    """Takes the arguments of flashattn_core.flash_attention or, if `bits` is given, of quantized_flash_attention."""
    result = run(query, key, value, scale, mask, return_lse=return_lse, **options)
    return (result.out, result.lse) if return_lse else result.out
