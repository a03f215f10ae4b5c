"""flashattn_core.check finds faults in GPU kernels. Here it checks CPU kernels with planted faults."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import NoKernelError, check, decide, flash_attention, quantized_flash_attention, survey
from flashattn_core.arguments import lowered
from flashattn_core.check import (
    LAYOUTS,
    KernelWarning,
    cases,
    difference,
    failure,
    gradient_failure,
    laid_out,
    lengths_of,
)
from flashattn_core.drawn import Kind
from flashattn_core.masks import And, Causal, KeyRange, SlidingWindow, Tree

GIVEN = {
    "causal": None,
    "softcap": None,
    "key_start": mx.int32,
    "key_stop": mx.int32,
    "tree": mx.uint32,
    "visible": mx.bool_,
    "bias": mx.float32,
    "sinks": mx.float32,
    "alibi_slopes": mx.float32,
}


def attention(*, bits=None, **arguments):
    if bits is None:
        return flash_attention(**arguments, return_lse=True, stream=mx.cpu)
    return quantized_flash_attention(**arguments, bits=bits, return_lse=True, stream=mx.cpu)


def kind(query_len=70, given=(), **more):
    return Kind(mx.float32, 24, 24, 2, query_len, {name: GIVEN.get(name) for name in given}, **more)


KINDS = [(), ("causal",), ("causal", "window"), *((name,) for name in GIVEN), tuple(GIVEN)]


@pytest.mark.parametrize("given", KINDS, ids="+".join)
@pytest.mark.parametrize("query_len", [1, 5, 70])
def test_nothing_is_found_in_what_is_right(query_len, given):
    assert failure(kind(query_len, given), attention, attention) == ""


def test_a_mask_of_whole_numbers_hides_nothing():
    of_kind = Kind(mx.float16, 24, 24, 2, 70, {"bias": mx.int32})
    assert failure(of_kind, attention, attention) == ""


IN_THE_MASK = {
    "causal": lambda part: isinstance(part, Causal),
    "window": lambda part: isinstance(part, SlidingWindow),
    "key_start": lambda part: isinstance(part, KeyRange),
    "key_stop": lambda part: isinstance(part, KeyRange),
    "tree": lambda part: isinstance(part, Tree),
    "visible": lambda part: isinstance(part, mx.array) and part.dtype == mx.bool_,
    "bias": lambda part: isinstance(part, mx.array) and part.dtype != mx.bool_,
}


@pytest.mark.parametrize("name", [*GIVEN, "window"])
@pytest.mark.parametrize("query_len", [4, 70])
def test_a_kernel_that_ignores_what_is_given_is_found(name, query_len):
    def ignoring(**arguments):
        if name in IN_THE_MASK:
            parts = tuple(part for part in arguments["mask"].parts if not IN_THE_MASK[name](part))
            arguments["mask"] = And(parts) if parts else None
        else:
            del arguments[name]
        return attention(**arguments)

    given = ("causal", "window") if name == "window" else (name,)
    assert "is wrong in" in failure(kind(query_len, given), ignoring, attention)


@pytest.mark.parametrize("query_len", [4, 70])
def test_rows_lie_in_every_way(query_len):
    ways = set()
    for case, layout in product(cases(of_kind := kind(query_len), lengths_of(of_kind)), LAYOUTS):
        key = np.array(laid_out(case.arguments, layout)["key"], copy=False)
        ways.add((key.strides[-1] == key.itemsize, key.strides[-2] % 16 == 0))
    assert ways == {(True, True), (True, False), (False, True)}


NO_ROW_SEES = [(70, name) for name in ("causal", "key_start", "key_stop", "visible", "bias", "window")]
NO_ROW_SEES += [(query_len, name) for query_len in (1, 5) for name in ("key_start", "key_stop", "visible", "window")]


@pytest.mark.parametrize(("query_len", "name"), NO_ROW_SEES)
def test_nan_in_a_key_that_no_row_sees(query_len, name):
    def adds_nothing_to_it(*, value, **arguments):
        """Computes like a kernel that multiplies hidden values by 0."""
        out, lse = attention(value=mx.nan_to_num(value), **arguments)
        return mx.where(mx.isnan(value).any(), mx.nan, out), lse

    given = ("causal", "window") if name == "window" else (name,)
    assert failure(kind(query_len, given), adds_nothing_to_it, attention).startswith("NaN in hidden keys")


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_keys_and_values(bits):
    groups = dict.fromkeys(("key_scales", "key_biases", "value_scales", "value_biases"), mx.float16)
    of_kind = Kind(mx.float16, 64, 64, 2, 3, groups, bits, group_size=32)

    def of_other_values(*, key, value, **arguments):
        return attention(key=key, value=key, **arguments)

    assert failure(of_kind, attention, attention) == ""
    assert "out is wrong" in failure(of_kind, of_other_values, attention)


def test_what_a_kernel_raises_is_its_failure():
    def refuses(**arguments):
        raise RuntimeError("the driver's own words")

    assert failure(kind(), refuses, attention) == "77 queries, 330 keys, contiguous: the driver's own words"


@pytest.mark.parametrize("says", ["[malloc] Unable to allocate 9 bytes.", "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"])
def test_without_memory_nothing_is_said_of_the_kernel(says):
    def has_none(**arguments):
        raise RuntimeError(says)

    with pytest.raises(MemoryError, match="no memory to check a kernel"):
        failure(kind(), has_none, attention)


@pytest.mark.parametrize("query_len", [1, 4])
def test_a_step_with_a_window_has_many_chunks(query_len):
    *_, many, _ = cases(of_kind := kind(query_len, ("causal", "window")), lengths_of(of_kind))
    assert many.arguments["mask"].parts[0].window == 2000


ROUNDED = mx.array([1.0, -3.0, 0.0, float("inf"), float("nan")])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_difference(dtype):
    got = ROUNDED.astype(dtype)
    assert difference(got, ROUNDED) == ""
    assert difference(got, ROUNDED * (1 + 3e-6)) == ""
    assert (
        difference(mx.where(got == -3, -3.5, got).astype(dtype), ROUNDED) == "is wrong in 1 of 5 numbers, by up to 0.5"
    )
    assert "1 of 5" in difference(mx.where(mx.isnan(got), 0, got).astype(dtype), ROUNDED)


# --- The gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", KINDS, ids="+".join)
def test_nothing_is_found_in_gradients_that_are_right(given):
    assert gradient_failure(kind(70, given), partial(check._gradients, stream=mx.cpu)) == ""


@pytest.mark.parametrize("number", range(4))
def test_a_gradient_that_is_wrong_is_found(number):
    def wrong(**arguments):
        gradients = list(check._gradients(**arguments, stream=mx.cpu))
        gradients[number] = gradients[number] * 1.01
        return gradients

    assert f"{('dq', 'dk', 'dv', 'dsinks')[number]} is wrong" in gradient_failure(kind(70, ("sinks",)), wrong)


# --- The check that a call starts ---------------------------------------------------------------------------


def arguments(length=77):
    query, key = mx.zeros((1, 4, length, 24)), mx.zeros((1, 2, 100, 24))
    return lowered(query, key, key, None, SlidingWindow(9) & KeyRange(2), softcap=3.0, sinks=mx.zeros(4))


def test_the_kind_of_a_call():
    given = {"causal": None, "window": None, "softcap": None, "key_start": mx.int32, "sinks": mx.float32}
    assert Kind(*arguments().kind()) == Kind(mx.float32, 24, 24, 2, 77, given)


def test_a_kernel_passes():
    assert check.of_call(arguments(), "cpu_prefill", mx.default_stream(mx.cpu)) == ""


def test_a_kernel_fails_with_a_warning_and_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    with pytest.warns(KernelWarning, match="cpu_decode fails its check on .*77 queries.* takes up to 8 queries"):
        wrong = check.of_call(arguments(), "cpu_decode", mx.default_stream(mx.cpu))
    [file] = (tmp_path / "failed").iterdir()
    assert f"Please send us the file {file}" in wrong
    assert "takes up to 8 queries" in file.read_text()


def test_a_check_within_a_traced_function():
    def traced(x):
        assert check.of_call(arguments(), "cpu_prefill", mx.default_stream(mx.cpu)) == ""
        return x + 1

    assert mx.compile(traced)(mx.array(1)).item() == 2
    assert mx.grad(lambda x: traced(x).sum())(mx.array(1.0)).item() == 1


def test_a_check_in_another_thread():
    def run():
        return check.of_call(arguments(), "cpu_prefill", mx.default_stream(mx.cpu))

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() == ""


# --- The checks that doctor starts ---------------------------------------------------------------------------


def test_each_kernel_of_a_backend_is_asked_for_what_it_takes(monkeypatch):
    asked = []
    monkeypatch.setattr(decide, "wrong_with", lambda call, kernel, stream: asked.append((kernel, call.kind())) or "")
    found = list(survey.of_backend("cpu"))
    kinds = len(list(survey.kinds_of_models()))
    quantised = sum(kind.bits > 0 for kind in survey.kinds_of_models())
    assert found == [("cpu_prefill", kinds, ""), ("cpu_decode", kinds, ""), ("cpu_backward", kinds - quantised, "")]
    assert len(asked) == sum(count for _, count, _ in found)
    assert {kind[4] <= 8 for kernel, kind in asked if kernel == "cpu_decode"} == {True}  # query_len


def test_what_a_kernel_of_a_backend_fails_at(monkeypatch):
    def wrong_with(call, kernel, stream):
        if kernel == "cpu_prefill":
            raise NoKernelError("[flash_attention] no memory to check a kernel")
        return f"{call.kind()[1]} fails" if kernel == "cpu_decode" and call.kind()[0] == mx.float32 else ""

    monkeypatch.setattr(decide, "wrong_with", wrong_with)
    found = {kernel: wrong for kernel, _, wrong in survey.of_backend("cpu")}
    assert found == {"cpu_decode": "64 fails", "cpu_prefill": "no memory to check a kernel", "cpu_backward": ""}
