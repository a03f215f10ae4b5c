"""Measures the tables of docs/nvidia.md on this machine's NVIDIA GPU: attention as published models call it.

    MLX_ENABLE_TF32=0 python packages/evals/scripts/measure_cuda_table.py

MLX's own attention and flash attention take turns. They are measured in two ways. In a stream, the calls of an
evaluation are independent, so they may overlap, and a decode step finds its keys in the GPU's cache. In a chain, each
call's query is the output of the call before, and each decode step has keys of its own, as in a model's layers.

A second table has quantised keys and values beside 16 bits, both by flash attention, because mlx-lm's own function is
wrong on CUDA: "time" is the ratio of the two. It also has the speed of reading, in GB/s and as a share of a copy's.

Flash attention is measured with precision="float32". The column "default" is for the patch with its default options:
precision="input", and MLX's own attention for the calls that MLX computes faster. Errors are computed for the drawn
queries ("error"), and for queries four times as large ("peaked").
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median
from timeit import timeit
from typing import Any

import flashattn_core
import mlx.core as mx
import numpy as np
from flash_evals.results.workload import GROUP_SIZE, ITEM_SIZE, Heads, Workload
from flash_evals.work import contest, machine
from flash_evals.work.measure import peak_memory
from flashattn_core.masks import Causal, KeyRange, Mask, SlidingWindow
from flashattn_core.reference import reference_attention
from mlxlm_flash_patch import described_masks, router
from mlxlm_flash_patch.mx_fast import flash_instead_of
from msgspec.structs import replace

# Each mx.eval() adds half a millisecond. So a trial evaluates enough calls at once to take TRIAL_SECONDS.
TRIALS, TRIAL_SECONDS = 7, 0.03
PRODUCTS, MEMORY = 800e12, 3.0e12  # an H100's FLOP/s in bfloat16 matrix products, and the bytes/s of its memory
# The layers of a decode step's chain have about CHAIN_BYTES of keys and values in total. The GPU's cache holds less. A
# chain has at most CHAIN_LENGTH layers.
CHAIN_BYTES, CHAIN_LENGTH = 256e6, 128
ROWS = 47  # errors are computed for at most this many queries, in two heads

Attention = Callable[[mx.array, Any, Any], mx.array]


class Call(Workload):
    sinks: bool = False
    softcap: float | None = None
    padding: tuple[int, ...] = ()  # hidden keys before each sequence of the batch

    def draw(self, seed: int) -> list[Any]:
        """Draws query, key, value and sinks on the GPU, because arrays from numpy would stay in managed memory."""
        dtype = getattr(mx, self.dtype)
        shapes = [(self.batch_size, self.num_heads, self.query_len, self.head_dim)]
        shapes += [(self.batch_size, self.num_kv_heads, self.seq_len, self.head_dim)] * 2
        random = mx.random.split(mx.random.key(seed), 4)
        drawn: list[Any] = [
            mx.random.normal(s, dtype, key=key) for s, key in zip([*shapes, (self.num_heads,)], random, strict=True)
        ]
        if self.kv_bits:
            drawn[1:3] = [mx.quantize(x, GROUP_SIZE, self.kv_bits) for x in drawn[1:3]]
        return drawn

    def seen(self, queries: mx.array) -> mx.array:
        """Returns which keys these queries see, as bools of shape (batch or 1, 1, queries, keys)."""
        key = mx.arange(self.seq_len)
        distance = (queries + self.seq_len - self.query_len)[:, None] - key
        starts = mx.array(self.padding or (0,))[:, None, None, None]
        return (distance >= 0) & (distance < (self.window or self.seq_len)) & (key >= starts)

    def limit(self) -> float:
        """The least seconds that an H100 can take: FLOP / PRODUCTS, or bytes of all arrays / MEMORY if that is more.

        Padding does not count.
        """
        parts = [
            replace(self, batch_size=1, query_len=min(self.query_len, self.seq_len - n), seq_len=self.seq_len - n)
            for n in self.padding or (0,) * self.batch_size
        ]
        query_bytes = self.batch_size * self.num_heads * self.query_len * self.head_dim * ITEM_SIZE[self.dtype]
        moved = sum(part.bytes_read for part in parts) + 2 * query_bytes
        return max(sum(part.flops("forward") for part in parts) / PRODUCTS, moved / MEMORY)


def call(
    heads: str,
    query_len: int,
    seq_len: int,
    *,
    window: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    kv_bits: int | None = None,
    **more: Any,
) -> Call:
    batch = len(more.get("padding", range(batch)))
    return Call(batch, seq_len, query_len, *Heads.parse(heads), True, window, dtype, kv_bits, **more)


PADDING = (0, 37, 120, 256, 411, 600, 900, 1023)
TABLE = {
    "window 512, 28/4x128, 4096²": call("28/4x128", 4096, 4096, window=512),
    "window 128, sinks, 64/8x64, 4096²": call("64/8x64", 4096, 4096, window=128, sinks=True),
    "window 1024, 8/4x256, 8192²": call("8/4x256", 8192, 8192, window=1024),
    "causal, 8/4x256, 4096²": call("8/4x256", 4096, 4096),
    "soft-cap 50, 8/4x256, 4096²": call("8/4x256", 4096, 4096, softcap=50.0),
    "left-padded batch of 8, 14/2x64, 2048²": call("14/2x64", 2048, 2048, padding=PADDING),
    "float32, causal, 28/4x128, 4096²": call("28/4x128", 4096, 4096, dtype="float32"),
    "float32, causal, 28/4x128, 16384²": call("28/4x128", 16384, 16384, dtype="float32"),
    "decode, 28/4x128, 32,768 keys": call("28/4x128", 1, 32768),
    "decode, padded batch of 8, 28/4x128, 4,096 keys": call("28/4x128", 1, 4096, padding=PADDING),
    "float32, decode, 28/4x128, 65,536 keys": call("28/4x128", 1, 65536, dtype="float32"),
    "decode, 8/4x256, 16,384 keys": call("8/4x256", 1, 16384),
    "decode, sinks, 64/8x64, 8,192 keys": call("64/8x64", 1, 8192, sinks=True),
    "8 queries, 28/4x128, 8,192 keys": call("28/4x128", 8, 8192),
    "causal, 28/4x128, 4096²": call("28/4x128", 4096, 4096),
    "causal, 28/4x128, 16384²": call("28/4x128", 16384, 16384),
    "causal, 28/4x128, 2048 x 26624": call("28/4x128", 2048, 26624),
    "causal, 28/4x128, 512 x 9000": call("28/4x128", 512, 9000),
    "causal, 32/8x128, 8192²": call("32/8x128", 8192, 8192),
    "causal, 14/2x64, 4096²": call("14/2x64", 4096, 4096),
    "causal, 32/8x64, 16384²": call("32/8x64", 16384, 16384),
    "causal, 32/32x96, 3000²": call("32/32x96", 3000, 3000),
    "causal, batch of 2, 16/16x80, 1777²": call("16/16x80", 1777, 1777, batch=2),
}
PEAKED = 4  # errors are also computed with queries this many times as large, which makes the softmax peaked
STORED = {
    f"{'decode' if length == 1 else 'causal'}, {bits} bits, {heads}, {keys:,} keys, batch {batch}": call(
        heads, length, keys, kv_bits=bits, batch=batch
    )
    for heads in ("28/4x128", "8/4x256")
    for bits in (8, 4)
    for length, keys, batch in (
        *((1, keys, batch) for keys in (4096, 16384, 32768, 131072) for batch in (1, 8)),
        (2048, 2048, 1),
        (4096, 4096, 1),
    )
}


def mask_of(call: Call) -> Mask | None:
    """Returns the mask that mlx-lm would pass for such a call: None for a single query that sees all keys."""
    if call.query_len == 1 and not (call.window or call.padding):
        return None
    mask: Mask = SlidingWindow(call.window) if call.window else Causal()
    return mask & KeyRange(mx.array(call.padding)) if call.padding else mask


def ours(call: Call, sinks: mx.array | None) -> Attention:
    if call.kv_bits:
        return partial(
            flashattn_core.quantized_flash_attention, mask=mask_of(call), group_size=GROUP_SIZE, bits=call.kv_bits
        )
    return partial(flashattn_core.flash_attention, mask=mask_of(call), sinks=sinks, softcap=call.softcap)


def as_patched(call: Call, sinks: mx.array | None) -> Attention:
    """Returns attention as a model calls it with the patch on, with the patch's default options. The patch replaces
    MLX's function or, with a softcap, gemma2's attention.
    """
    mask: Any = mask_of(call)
    scale = call.head_dim**-0.5
    if isinstance(mask, Causal):
        mask = "causal"
    elif mask is not None:  # an array that nobody evaluates, and the patch's description of it
        description, mask = mask, call.seen(mx.arange(call.query_len))
        described_masks._remember(mask, description)
    if call.softcap is None:
        return partial(flash_instead_of(mx.fast.scaled_dot_product_attention), scale=scale, mask=mask, sinks=sinks)

    def attention(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        return router.attend(query, key, value, scale, mask, sinks, call.softcap)

    return attention


def mlx_own(call: Call, sinks: mx.array | None) -> Attention:
    """Returns MLX's own attention, as mlx-lm calls it. With a softcap, computes what mlx_lm.models.gemma2 does."""
    scale, softcap = call.head_dim**-0.5, call.softcap
    attention = partial(mx.fast.scaled_dot_product_attention, scale=scale, sinks=sinks)
    if not (call.padding or call.window or softcap):
        return partial(attention, mask="causal" if call.query_len > 1 else None)
    mx.eval(mask := call.seen(mx.arange(call.query_len)))
    if softcap is None:
        return partial(attention, mask=mask)

    def written_out(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        grouped = (query * scale).reshape(call.batch_size, call.num_kv_heads, -1, *query.shape[2:])
        scores = mx.tanh(grouped @ key[:, :, None].swapaxes(-1, -2) / softcap) * softcap
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        return (mx.softmax(scores, precise=True, axis=-1) @ value[:, :, None]).reshape(query.shape)

    return written_out


def errors(call: Call, drawn: Sequence[Any], outputs: Sequence[mx.array]) -> list[float]:
    """Returns the root mean square error of each output. For a 16-bit dtype, each error is divided by the error of the
    exact result rounded to the dtype.
    """
    first = max(0, call.query_len - call.seq_len + max(call.padding, default=0))  # the first query that sees a key
    rows = mx.array(np.unique(np.linspace(first, call.query_len - 1, ROWS, dtype=np.int32)))

    def exactly(array: Any, rows: mx.array | slice = slice(None)) -> np.ndarray:
        if not isinstance(array, mx.array):
            words, scales, biases = (x[:1, mx.array([0, -1])] for x in array)
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            return np.array(mx.dequantize(words, scales, biases, GROUP_SIZE, call.kv_bits), np.float64)
        # Copies the rows first, because numpy would move the whole array to the host.
        picked = array[: len(call.padding) or 1, mx.array([0, -1])][:, :, rows]
        return np.array(picked.astype(mx.float32), np.float64)

    query, key, value, sinks = drawn
    two_sinks = exactly(sinks[None, :, None])[0, :, 0] if call.sinks else None
    arrays = exactly(query, rows), exactly(key), exactly(value)
    exact, _ = reference_attention(*arrays, mask=call.seen(rows), softcap=call.softcap, sinks=two_sinks)
    rms = [np.sqrt(np.mean((exactly(out, rows) - exact) ** 2)) for out in outputs]
    rounded = np.array(mx.array(exact.astype(np.float32)).astype(query.dtype).astype(mx.float32))
    unit = 1 if call.dtype == "float32" else np.sqrt(np.mean((rounded - exact) ** 2))
    return [float(each / unit) for each in rms]


def stream(attend: Attention, inputs: Sequence[Sequence[Any]], count: int) -> None:
    mx.eval([attend(*inputs[0]) for _ in range(count)])


def chain(attend: Attention, inputs: Sequence[Sequence[Any]], count: int) -> None:
    query = inputs[0][0]
    for _, key, value in islice(cycle(inputs), count):
        query = attend(query, key, value)
    mx.eval(query)


def in_turns(ways: Mapping[str, Callable[[int], None]], trials: int) -> list[float]:
    """Runs the functions of `ways` in turns. Returns each function's median seconds per call."""
    counts = dict.fromkeys(ways, 1)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, run in ways.items():
        run(1)
        while timeit(partial(run, counts[name]), number=1) < TRIAL_SECONDS:
            counts[name] *= 2
    for trial in range(trials):
        for name in contest.order(list(ways), trial):
            times[name].append(timeit(partial(ways[name], counts[name]), number=1) / counts[name])
    return [median(taken) for taken in times.values()]


def layers_of(call: Call) -> list[list[Any]]:
    """Draws what each layer of a chain has."""
    layers = min(CHAIN_LENGTH, int(CHAIN_BYTES / call.bytes_read)) if call.query_len <= 16 else 1
    drawn = [call.draw(layer) for layer in range(max(1, layers))]
    mx.eval(drawn)
    return drawn


def measured(call: Call, trials: int = TRIALS) -> dict[str, list[float]]:
    """Measures the contestants: MLX's own attention, flash attention, and attention with the patch on. Each list in the
    result has one figure for each contestant: "memory" in bytes beyond the inputs, "stream" and "chain" in seconds per
    call, "errors" for the drawn queries, and "peaked" for errors with larger queries."""
    drawn = layers_of(call)
    sinks, inputs = drawn[0][3] if call.sinks else None, [arrays[:3] for arrays in drawn]
    contestants = {"MLX's own": mlx_own(call, sinks), "ours": ours(call, sinks), "default": as_patched(call, sinks)}
    outputs, memory = [], []
    for attend in contestants.values():
        mx.eval(attend(*inputs[0]))  # compiles the kernels
        with peak_memory() as peak:
            outputs.append(attend(*inputs[0]))
            mx.eval(outputs[-1])
            memory.append(float(peak()))
    query, *others = drawn[0]
    larger = query * PEAKED
    peaked = [attend(larger, *others[:2]) for attend in contestants.values()]
    found = {"errors": errors(call, drawn[0], outputs), "memory": memory}
    found["peaked"] = errors(call, [larger, *others], peaked)
    for way in (stream, chain):
        found[way.__name__] = in_turns({who: partial(way, f, inputs) for who, f in contestants.items()}, trials)
    return found


def copy_bandwidth() -> float:
    """How many bytes a copy reads and writes per second."""
    source = mx.zeros((2**28,), mx.uint32)
    mx.eval(source)

    def copies(count: int) -> None:
        for _ in range(count):
            mx.eval(source + 1)

    (seconds,) = in_turns({"copy": copies}, TRIALS)
    return 2 * float(source.nbytes) / seconds


def measure_stored(names: Sequence[str] = tuple(STORED)) -> None:
    copy = copy_bandwidth()
    print(f"\nKeys in 16 bits / quantised in groups of {GROUP_SIZE}; a copy moves {copy / 1e9:,.0f} GB/s\n")
    titles = "call | stream, µs | time | GB/s / share | chain, µs | time | GB/s / share | error"
    print(f"| {titles} |\n" + "|---" * 8 + "|")
    for name in names:
        call, cells = STORED[name], [name]
        calls = {"16 bits": replace(call, kv_bits=None), "ours": call}
        layers = {who: layers_of(each) for who, each in calls.items()}
        for way in (stream, chain):
            runs = {who: partial(way, ours(each, None), [x[:3] for x in layers[who]]) for who, each in calls.items()}
            in_16_bits, flash = in_turns(runs, TRIALS)
            rate = call.bytes_read / flash
            cells += [f"{in_16_bits * 1e6:,.1f} / {flash * 1e6:,.1f}", f"{flash / in_16_bits:.2f}x"]
            cells += [f"{rate / 1e9:,.0f} / {rate / copy:.0%}"]
        drawn = layers["ours"][0]
        cells += [f"{error:.3g}" for error in errors(call, drawn, [ours(call, None)(*drawn[:3])])]
        print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    if not mx.cuda.is_available():
        sys.exit("MLX finds no NVIDIA GPU: on a machine with one, pip install 'flashattn-core[cuda13]'")
    print(f"{machine.device()}: MLX's own / ours, precision float32 / the patch's default\n")
    titles = (
        "call | stream, µs | gain / share | default | chain, µs | gain / share | default | memory, MB | error | peaked"
    )
    print(f"| {titles} |\n" + "|---" * 10 + "|")
    with router.inside(router.in_model):  # like enable(), but mx.fast keeps MLX's own function
        for name, call in TABLE.items():
            found, cells = measured(call), [name]
            for way in ("stream", "chain"):
                own, flash, default = found[way]
                cells += [" / ".join(f"{t * 1e6:,.1f}" for t in found[way])]
                cells += [f"{own / flash:.2f}x / {call.limit() / flash:.0%}", f"{own / default:.2f}x"]
            cells += [" / ".join(f"{n / 1e6:,.1f}" for n in found["memory"][:2])]
            cells += [" / ".join(f"{n:.3g}" for n in found[which]) for which in ("errors", "peaked")]
            print("|", " | ".join(cells), "|", flush=True)
    measure_stored()


if __name__ == "__main__":
    main()
