"""Measures the peak memory of attention, forward and backward, in a process that does nothing else.

This command prints the peak for causal calls of 1k to 32k positions, and the bytes of inputs, results and gradients:

    uv run python -m tests.core.backward_memory [--dtype float32]
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
from flash_evals.work import measure
from flashattn_core import flash_attention, release_scratch

HEAD_DIM = 64
LENGTHS = [1024 << i for i in range(6)]


@dataclass(frozen=True)
class Call:
    length: int
    heads: int
    kv_heads: int
    dtype: str

    @property
    def _queries(self) -> int:
        """Bytes of query. out and query's gradient are as large."""
        return self.heads * self.length * HEAD_DIM * getattr(mx, self.dtype).size

    @property
    def _keys(self) -> int:
        """Bytes of key. value and the gradients of key and value are as large."""
        return self._queries * self.kv_heads // self.heads

    @property
    def _rows(self) -> int:
        """Bytes of lse: one float32 per row. The row maxima, the row sums and delta are as large."""
        return self.heads * self.length * 4

    @property
    def made(self) -> int:
        """Bytes of out, lse, the row maxima and sums, and the gradients."""
        return 2 * self._queries + 2 * self._keys + 3 * self._rows

    @property
    def held(self) -> int:
        """Bytes of the inputs, the results and the gradients."""
        return self._queries + 2 * self._keys + self.made

    @property
    def needed(self) -> int:
        """Bytes beyond the inputs, as docs/training.md counts them.

        These are `made`, delta and, in 16-bit calls, out in float32 and half of the float32 sum of query's gradient.
        The memory of the gradient itself holds the other half.
        """
        return self.made + self._rows + (3 * self._queries if self.dtype != "float32" else 0)


def peak_extra(call: Call) -> tuple[int, int]:
    """Runs forward and backward in a fresh process. Inputs, cotangent and threads exist before the measurement.

    Returns by how many bytes the process grows at its peak, and how many of these are the threads' scratch memory.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh_process:
        return fresh_process.submit(_peak_extra, call).result()


def _peak_extra(call: Call) -> tuple[int, int]:
    mx.set_default_device(mx.cpu)
    query, key, value, out_gradient = (
        mx.random.normal((1, heads, call.length, HEAD_DIM)).astype(getattr(mx, call.dtype))
        for heads in (call.heads, call.kv_heads, call.kv_heads, call.heads)
    )

    def forward_and_backward(rows: int) -> None:
        def attention(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
            return flash_attention(query, key, value, mask="causal")

        primals = [x[:, :, :rows] for x in (query, key, value)]
        mx.eval(mx.vjp(attention, primals, [out_gradient[:, :, :rows]]))

    mx.eval(query, key, value, out_gradient)
    for _ in range(20):  # starts the threads; on a busy machine some threads take part only in later calls
        forward_and_backward(600)
    with measure.peak_memory() as peak:
        forward_and_backward(call.length)
        return peak(), release_scratch()


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of attention forward and backward, causal, head_dim 64.")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    options = parser.parse_args()
    print(f"{'L':>6}  {'held MB':>8}  {'peak extra MB':>13}  ratio")
    for length in LENGTHS:
        call = Call(length, 14, 2, options.dtype)
        extra, _ = peak_extra(call)
        print(f"{length:>6}  {call.held / 1e6:>8.1f}  {extra / 1e6:>13.1f}  {extra / call.held:>5.2f}", flush=True)


if __name__ == "__main__":
    main()
