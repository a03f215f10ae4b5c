"""Helpers that run flashattn_core.check on GPU kernels in an emulator (tests/emulators), and calls to check."""

from collections.abc import Callable

import mlx.core as mx
from flashattn_core import flash_attention, quantized_flash_attention
from flashattn_core.check import Lengths, error_of, failure
from flashattn_core.drawn import Kind

from tests.emulators.metal_on_cpu import MetalError
from tests.metal.metal_attention import Run

# The optional arguments of calls, each with the dtype of its array, or None if it is no array.
GIVEN = {
    "nothing": {},
    "causal": {"causal": None},
    "window, sinks and soft-cap": {"causal": None, "window": None, "softcap": None, "sinks": mx.float16},
    "ranges and slopes": {"key_start": mx.int32, "key_stop": mx.int32, "alibi_slopes": mx.float32},
    "a tree": {"tree": mx.uint32},
    "arrays": {"visible": mx.bool_, "bias": mx.float16},
}
# Key lengths for calls with few queries. With the check's own lengths the emulator would need a minute.
FEW_KEYS, MANY_KEYS = 90, 400


def kind(query_len: int, given: str = "nothing", dtype: mx.Dtype = mx.float16, **sizes) -> Kind:
    return Kind(
        dtype, query_len=query_len, given=GIVEN[given], **{"head_dim": 64, "value_dim": 64, "group": 2, **sizes}
    )


def quantised(query_len: int, bits: int) -> Kind:
    given = dict.fromkeys(("key_scales", "key_biases", "value_scales", "value_biases"), mx.float16)
    return Kind(mx.float16, 64, 64, 2, query_len, given, bits, group_size=32)


def on_cpu(*, bits=None, **arguments):
    attention = flash_attention if bits is None else quantized_flash_attention
    storage = {} if bits is None else {"bits": bits}
    return attention(**arguments, **storage, return_lse=True, stream=mx.cpu)


def found(
    run: Callable[..., Run],
    kernel: str,
    kind: Kind,
    edit: Callable[[str], str] = lambda source: source,
    lengths: Lengths | None = None,
) -> str:
    """Returns what the check finds wrong with the kernel after `edit` changed its source.

    lengths: of queries and keys; None: a few tiles.
    """

    def attention(**arguments):
        try:
            result = run(**arguments, kernel=kernel, edit=edit)
        except MetalError as error:  # MLX raises RuntimeError for a GPU's errors
            raise RuntimeError(str(error)) from error
        return result.out, result.lse

    few = kind.query_len <= 16
    shorter = [(kind.query_len, keys) for keys in (FEW_KEYS, MANY_KEYS)] if few else [(77, 150), (64, 128)]
    return failure(kind, attention, on_cpu, lengths or shorter, error_of(kernel, kind, kernel.endswith("_rounded")))


ROW_RESULT = "return RowResult{normalise / softmax.row_sum,"  # every kernel's source has this text


def wrong_where(condition: str) -> Callable[[str], str]:
    """Makes outputs one percent too large where the condition holds."""
    return lambda source: source.replace(ROW_RESULT, ROW_RESULT[:-1] + f" * ({condition} ? 1.01f : 1.0f),")


def nan_where(condition: str, text: str) -> Callable[[str], str]:
    """Makes outputs NaN where the condition holds. text: the kernel code before a factor of the output."""
    return lambda source: source.replace(text, text + f"({condition} ? INFINITY * 0.0f : 1.0f) * ")


def does_not_compile(source: str) -> str:
    return source + "\nthis is no text of a kernel\n"
