"""Tests of flashattn_core.check, a check of GPU kernels. The kernels run on the CPU here, in tests/emulators."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from flashattn_core import _ext, flash_attention, quantized_flash_attention
from flashattn_core.check.compare import Lengths, error_of, failure

from tests.emulators.metal_on_cpu import MetalError
from tests.metal.metal_attention import Run

# Maps a name to a set of optional arguments: {argument: its dtype, or None if it is no array}.
GIVEN = {
    "nothing": {},
    "causal": {"causal": None},
    "window, sinks and soft-cap": {"causal": None, "window": None, "softcap": None, "sinks": mx.float16},
    "ranges and slopes": {"key_start": mx.int32, "key_stop": mx.int32, "alibi_slopes": mx.float32},
    "a tree": {"tree": mx.uint32},
    "arrays": {"visible": mx.bool_, "bias": mx.float16},
}
# Key lengths for calls with few queries. flashattn_core.check has longer ones, which would take a minute here.
FEW_KEYS, MANY_KEYS = 90, 400


def call(query_len: int, given: str = "nothing", dtype: mx.Dtype = mx.float16, group: int = 2, **sizes) -> _ext.Call:
    return _ext.Call(dtype, heads=group, query_len=query_len, given=GIVEN[given], **{"head_dim": 64, **sizes})


def quantised(query_len: int, bits: int) -> _ext.Call:
    given = dict.fromkeys(("key_scales", "key_biases", "value_scales", "value_biases"), mx.float16)
    return _ext.Call(mx.float16, 64, heads=2, query_len=query_len, given=given, bits=bits, group_size=32)


def variant_of(kernel: str) -> _ext.Variant:
    """The variant that the kernel's name in these tests means, see launches.form()."""
    name = kernel.removesuffix("_rounded")
    return _ext.Variant(getattr(_ext.Kernel, name.removesuffix("_hopper")), rounds=name != kernel)


def on_cpu(*, bits=None, **arguments):
    attention = flash_attention if bits is None else quantized_flash_attention
    storage = {} if bits is None else {"bits": bits}
    return attention(**arguments, **storage, return_lse=True, stream=mx.cpu)


def found(
    run: Callable[..., Run],
    kernel: str,
    call: _ext.Call,
    edit: Callable[[str], str] = lambda source: source,
    lengths: Lengths | None = None,
) -> str:
    """Returns what the check finds wrong with the kernel after `edit` changed its source.

    lengths: the pairs (query length, key length) to try. The default is lengths of a few tiles.
    """

    def attention(**arguments):
        try:
            result = run(**arguments, kernel=kernel, edit=edit)
        except MetalError as error:  # MLX raises RuntimeError for a GPU's errors
            raise RuntimeError(str(error)) from error
        return result.out, result.lse

    few = call.query_len <= 16
    shorter = [(call.query_len, keys) for keys in (FEW_KEYS, MANY_KEYS)] if few else [(77, 150), (64, 128)]
    return failure(call, attention, on_cpu, lengths or shorter, error_of(variant_of(kernel), call))


ROW_RESULT = "return RowResult{normalise / softmax.row_sum,"  # every kernel's source has this text


def wrong_where(condition: str) -> Callable[[str], str]:
    """Returns an edit of a kernel's source. It makes outputs one percent too large where the condition holds."""
    return lambda source: source.replace(ROW_RESULT, ROW_RESULT[:-1] + f" * ({condition} ? 1.01f : 1.0f),")


def nan_where(condition: str, text: str) -> Callable[[str], str]:
    """Returns an edit of a kernel's source. A factor after `text` makes outputs NaN where the condition holds.

    `text` must be kernel code that ends just before a factor of the output.
    """
    return lambda source: source.replace(text, text + f"({condition} ? INFINITY * 0.0f : 1.0f) * ")


def does_not_compile(source: str) -> str:
    return source + "\nthis is no text of a kernel\n"


def rules(
    run: Callable[..., Run],
    decode: str,
    prefill: str,
    lengths: dict[str, int],
    other_kinds: dict[str, tuple[str, _ext.Call]],
    nan: dict[str, Callable[[str], str]],
) -> dict[str, Callable[..., None]]:
    """Returns the tests that Metal's and CUDA's kernels share.

    `decode` is a kernel for few queries, and `prefill` one for many. `lengths` maps a kernel to the number of queries
    in its calls. `other_kinds` maps a name to a kernel and a call for it. `nan` maps a kernel to an edit of its
    source that makes an output of the last tile NaN.
    """

    @pytest.mark.parametrize("given", GIVEN)
    @pytest.mark.parametrize("kernel", lengths)
    def test_nothing_is_found(kernel, given):
        assert found(run, kernel, call(lengths[kernel], given)) == ""

    @pytest.mark.parametrize("name", other_kinds)
    def test_nothing_is_found_in_other_kinds(name):
        assert found(run, *other_kinds[name]) == ""

    @pytest.mark.parametrize("kernel", lengths)
    def test_one_percent_in_a_head_is_found(kernel):
        wrong = found(run, kernel, call(lengths[kernel], "causal"), wrong_where("head == 1 && batch == 1"))
        assert "out is wrong in" in wrong

    @pytest.mark.parametrize("kernel", nan)
    def test_nan_in_the_last_tile_is_found(kernel):
        assert "out is wrong in" in found(run, kernel, call(lengths[kernel]), nan[kernel])

    def test_what_does_not_compile_is_found():
        assert "this is no text" in found(run, prefill, call(77), does_not_compile)

    def test_what_is_wrong_for_more_keys_than_are_tried_is_not_found():
        assert f"{MANY_KEYS} keys" in found(run, decode, call(1), wrong_where(f"params.key_len >= {MANY_KEYS}"))
        assert found(run, decode, call(1), wrong_where(f"params.key_len > {MANY_KEYS}")) == ""

    return {name: test for name, test in locals().items() if name.startswith("test_")}
