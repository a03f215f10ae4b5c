"""flashattn_core.check finds faults in kernels, here in the CPU's with planted faults, and keeps its verdicts."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import NoKernelError, _ext, check, flash_attention, quantized_flash_attention, storage
from flashattn_core.arguments import lowered
from flashattn_core.check import KernelWarning, compare, drawn, survey
from flashattn_core.check.compare import LAYOUTS, cases, difference, failure, gradient_failure, lengths_of, with_rows
from flashattn_core.masks import And, Causal, KeyRange, SlidingWindow, Tree

from tests.promises import promise

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


def call(query_len=70, given=()):
    return _ext.Call(mx.float32, 24, heads=2, query_len=query_len, given={name: GIVEN.get(name) for name in given})


KINDS = [(), ("causal",), ("causal", "window"), *((name,) for name in GIVEN), tuple(GIVEN)]


@pytest.mark.parametrize("given", KINDS, ids="+".join)
@pytest.mark.parametrize("query_len", [1, 5, 70])
def test_nothing_is_found_in_what_is_right(query_len, given):
    assert failure(call(query_len, given), attention, attention) == ""


IN_THE_MASK = {
    "causal": lambda part: isinstance(part, Causal),
    "window": lambda part: isinstance(part, SlidingWindow),
    "key_start": lambda part: isinstance(part, KeyRange),
    "key_stop": lambda part: isinstance(part, KeyRange),
    "tree": lambda part: isinstance(part, Tree),
    "visible": lambda part: isinstance(part, mx.array) and part.dtype == mx.bool_,
    "bias": lambda part: isinstance(part, mx.array) and part.dtype != mx.bool_,
}


@promise("the check finds a kernel that ignores an argument")
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
    assert "is wrong in" in failure(call(query_len, given), ignoring, attention)


@pytest.mark.parametrize("query_len", [4, 70])
def test_rows_lie_in_every_way(query_len):
    ways = set()
    for (_, arguments, _), layout in product(cases(asked := call(query_len), lengths_of(asked)), LAYOUTS):
        key = np.array(with_rows(arguments, LAYOUTS[layout])["key"], copy=False)
        ways.add((key.strides[-1] == key.itemsize, key.strides[-2] % 16 == 0))
    assert ways == {(True, True), (True, False), (False, True)}


NO_ROW_SEES = [(70, name) for name in ("causal", "key_start", "key_stop", "visible", "bias", "window")]
NO_ROW_SEES += [(query_len, name) for query_len in (1, 5) for name in ("key_start", "key_stop", "visible", "window")]


@promise("the check finds a kernel that lets NaN through")
@pytest.mark.parametrize(("query_len", "name"), NO_ROW_SEES)
def test_nan_in_a_key_that_no_row_sees(query_len, name):
    def adds_nothing_to_it(*, value, **arguments):
        """Computes like a kernel that multiplies hidden values by 0."""
        out, lse = attention(value=mx.nan_to_num(value), **arguments)
        return mx.where(mx.isnan(value).any(), mx.nan, out), lse

    given = ("causal", "window") if name == "window" else (name,)
    assert failure(call(query_len, given), adds_nothing_to_it, attention).startswith("NaN in hidden keys")


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_keys_and_values(bits):
    groups = dict.fromkeys(("key_scales", "key_biases", "value_scales", "value_biases"), mx.float16)
    asked = _ext.Call(mx.float16, 64, heads=2, query_len=3, given=groups, bits=bits, group_size=32)

    def of_other_values(*, key, value, **arguments):
        return attention(key=key, value=key, **arguments)

    assert failure(asked, attention, attention) == ""
    assert "out is wrong" in failure(asked, of_other_values, attention)


def test_what_a_kernel_raises_is_its_failure():
    refuses = Mock(side_effect=RuntimeError("the driver's own words"))
    assert failure(call(), refuses, attention) == "77 queries, 330 keys, contiguous: the driver's own words"


@pytest.mark.parametrize("says", ["[malloc] Unable to allocate 9 bytes.", "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"])
def test_without_memory_nothing_is_said_of_the_kernel(says):
    with pytest.raises(MemoryError, match="no memory to check a kernel"):
        failure(call(), Mock(side_effect=RuntimeError(says)), attention)


@pytest.mark.parametrize("query_len", [1, 4])
def test_a_step_with_a_window_has_many_chunks(query_len):
    *_, (_, many, _), _ = cases(asked := call(query_len, ("causal", "window")), lengths_of(asked))
    assert many["mask"].parts[0].window == 2000


ROUNDED = mx.array([1.0, -3.0, 0.0, float("inf"), float("nan")])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_difference(dtype):
    got = ROUNDED.astype(dtype)
    assert difference(got, ROUNDED) == ""
    assert difference(got, ROUNDED * (1 + 3e-6)) == ""
    wrong = mx.where(got == -3, -3.5, got).astype(dtype)
    assert difference(wrong, ROUNDED) == "is wrong in 1 of 5 numbers, by up to 0.5"
    assert "1 of 5" in difference(mx.where(mx.isnan(got), 0, got).astype(dtype), ROUNDED)


def test_what_rounding_may_change():
    """A kernel that rounds probabilities to 16 bits may change out by half a rounding error, but not lse."""
    asked, rounds = _ext.Call(mx.float16, 24, heads=2, query_len=70), _ext.Variant(_ext.Kernel.cuda_prefill, True)

    def found(of_out, of_lse, **how):
        def changes(**arguments):
            out, lse = attention(**arguments)
            return out + of_out, lse + of_lse

        return failure(asked, changes, attention, **how)

    assert "out is wrong" in found(2e-4, 0)
    assert found(2e-4, 0, variant=rounds) == ""
    assert "lse is wrong" in found(0, 2e-4, variant=rounds)


# --- The gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", KINDS, ids="+".join)
def test_nothing_is_found_in_gradients_that_are_right(given):
    assert gradient_failure(call(70, given), partial(compare._gradients, stream=mx.cpu)) == ""


@promise("the check finds an error of one percent in a gradient")
@pytest.mark.parametrize("number", range(4))
def test_a_gradient_that_is_wrong_is_found(number):
    def wrong(**arguments):
        gradients = list(compare._gradients(**arguments, stream=mx.cpu))
        gradients[number] = gradients[number] * 1.01
        return gradients

    assert f"{('dq', 'dk', 'dv', 'dsinks')[number]} is wrong" in gradient_failure(call(70, ("sinks",)), wrong)


# --- The check that a call starts ---------------------------------------------------------------------------


PREFILL, DECODE = (_ext.Variant(kernel) for kernel in (_ext.Kernel.cpu_prefill, _ext.Kernel.cpu_decode))
CPU = mx.default_stream(mx.cpu)


def given_call(length=77):
    query, key = mx.zeros((1, 4, length, 24)), mx.zeros((1, 2, 100, 24))
    return lowered(query, key, key, None, SlidingWindow(9) & KeyRange(2), softcap=3.0, sinks=mx.zeros(4)).call


def test_what_a_call_is():
    found = given_call()
    given = {"causal": None, "window": None, "softcap": None, "key_start": mx.int32, "sinks": mx.float32}
    assert (found.dtype, found.head_dim, found.value_dim, found.heads, found.kv_heads) == (mx.float32, 24, 24, 4, 2)
    assert (found.query_len, found.key_len, found.batch_size, found.window, found.given) == (77, 100, 1, 9, given)


@pytest.mark.parametrize("softcap", [5.0, 1e31])
def test_a_softcap_is_checked_with_the_programs_of_its_size(softcap):
    query = mx.zeros((1, 4, 9, 64), mx.float16)
    asked = lowered(query, query, query, None, None, softcap=softcap).call
    tried = lowered(**drawn.drawn(asked, 9, 9), scale=None).call
    on = _ext.Variant(_ext.Kernel.cuda_prefill), _ext.Device("cuda", 90)
    assert _ext.programs(tried, *on) == _ext.programs(asked, *on)


@pytest.mark.parametrize("found", ["its bits differ", RuntimeError("does not compile")])
def test_an_append_that_fails_its_check_is_left_to_mlx(monkeypatch, found):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    monkeypatch.setattr(storage, "_difference", Mock(side_effect=[found]))
    with pytest.warns(KernelWarning, match=str(found)):
        assert storage.append([], [], [mx.zeros(1)], 0, 64, 8) is None
    storage._has_mlxs_bits.cache_clear()


def test_what_usually_follows_a_prompt():
    def names(*others):
        return {"softcap", "sinks", *others}

    step, *others = given_call().usual_next()
    assert (step.query_len, step.window, set(step.given)) == (1, 0, names("key_start"))
    masks = {"causal", "window"}
    assert [(each.query_len, set(each.given)) for each in others] == [
        (length, names(*padding, *(masks if length > 1 else ())))
        for padding in (("key_start",), ())
        for length in (32, 4096, 1)
    ]


def test_a_decode_step_is_checked_with_so_many_keys_that_kernels_merge_chunks():
    lengths = compare.lengths_of(_ext.Call(mx.float16, 64), _ext.Variant(_ext.Kernel.cuda_decode))
    assert [queries for queries, _ in lengths] == [1] * len(lengths)
    assert max(keys for _, keys in lengths) > 2000


def test_of_a_traced_call_exact_out_is_checked_too(monkeypatch):
    def wrong(**arguments):
        out, lse, exact_out = attend(**arguments)
        return out, lse, exact_out if arguments["stream"] == mx.cpu else exact_out * 1.01

    call, attend = _ext.Call(mx.float16, 24, heads=2, query_len=77, key_len=100, is_traced=True), compare._attend
    assert compare.of_call(call, PREFILL, CPU) == ""
    monkeypatch.setattr(compare, "_attend", wrong)
    assert "exact_out is wrong" in compare.of_call(call, PREFILL, CPU)


def test_a_check_within_a_traced_function():
    def traced(x):
        assert compare.of_call(given_call(), PREFILL, CPU) == ""
        return x + 1

    assert mx.compile(traced)(mx.array(1)).item() == 2
    assert mx.grad(lambda x: traced(x).sum())(mx.array(1.0)).item() == 1


@pytest.mark.parametrize("variant", [PREFILL, compare._GRADIENT_ON_CPU])
def test_a_check_in_another_thread(variant):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: compare.of_call(given_call(), variant, mx.default_stream(mx.cpu))).result() == ""


def a_gpu(*programs, backend="cuda", raises=None, software="an H100, sm_90a, a driver, NVRTC 13.0"):
    """Stands in for a GPU's part of _ext. Each compilation raises `raises`."""
    stand_ins = {
        "backend_of": lambda device: backend,
        "software": lambda device: software,
        "programs": lambda call, variant, device: list(programs),
        "compile": Mock(side_effect=raises),
        "choose": lambda call, device: SimpleNamespace(variant=DECODE),
    }
    return SimpleNamespace(**vars(_ext) | stand_ins)


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """Asks for the verdict on a kernel. Returns it, and how many times the kernel was compared with the CPU's."""
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))

    def of(gpu, says=""):
        monkeypatch.setattr(compare, "of_call", of_call := Mock(side_effect=[says]))
        monkeypatch.setattr(check, "_ext", gpu)
        return check.wrong_with(given_call(), PREFILL, CPU), of_call.call_count

    return of


def test_each_program_is_checked_once_on_a_machine(verdict):
    assert verdict(a_gpu("a 1", "b 2")) == ("", 1)
    assert verdict(a_gpu("b 2")) == ("", 0)
    assert verdict(a_gpu("b 2", "c 3")) == ("", 1)


@promise("a passed check counts only for the same device, driver, versions and text")
@pytest.mark.parametrize("change", [{"software": "an H100, sm_90a, a newer driver, NVRTC 13.0"}, {"backend": "metal"}])
def test_other_software_is_checked(verdict, change):
    verdict(a_gpu("a 1"))
    assert verdict(a_gpu("a 1", **change))[1] == ("software" in change)
    assert verdict(a_gpu("a 4"))[1] == 1  # another text


@promise("a program that we have tested with the same compiler and architecture is not checked")
def test_what_we_have_tested_is_not_checked(verdict, monkeypatch):
    monkeypatch.setattr(check, "_tested", lambda: {"sm_90a, NVRTC 13.0": frozenset({"1"})})
    tested = a_gpu("a 1")
    assert verdict(tested) == ("", 0)
    assert verdict(a_gpu("a 1", software="an H100, sm_90a, a driver, NVRTC 13.1"))[1] == 1
    assert verdict(a_gpu("a 1", "b 2"))[1] == 1


@pytest.mark.parametrize(("backend", "compiled"), [("cuda", [True]), ("metal", [])])
def test_for_a_check_all_cuda_programs_are_compiled_first(verdict, backend, compiled):
    gpu = a_gpu("a 1", backend=backend)
    assert verdict(gpu) == ("", 1)
    assert [each.args[-1] for each in gpu.compile.mock_calls] == compiled


@promise("a kernel that fails its check is named in a warning and a file")
def test_what_fails_warns_leaves_a_file_and_is_checked_by_the_next_process(verdict, tmp_path):
    with pytest.warns(KernelWarning, match="cpu_prefill fails its check on .*: it differs"):
        wrong, _ = verdict(a_gpu("a 1"), "it differs")
    [file] = (tmp_path / "failed").iterdir()
    assert wrong.endswith(f"it differs. Please send us the file {file}")
    assert "it differs" in file.read_text()
    assert verdict(a_gpu("a 1")) == ("", 1)


def test_what_does_not_compile_fails(verdict):
    with pytest.warns(KernelWarning, match="the driver's own words"):
        wrong, _ = verdict(a_gpu("a 1", raises=NoKernelError("[flash_attention] the driver's own words")))
    assert "the driver's own words" in wrong


def test_without_memory_for_a_check_nothing_is_said_of_the_kernel_and_the_next_call_checks(verdict):
    with pytest.raises(NoKernelError, match="no memory to check a kernel"):
        verdict(a_gpu("a 1"), MemoryError("no memory to check a kernel"))
    assert verdict(a_gpu("a 1")) == ("", 1)


def test_never(verdict, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "never")
    assert verdict(a_gpu("a 1"), "it differs") == ("", 0)


def test_nonsense_in_the_environment_is_refused(verdict, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "always")
    with pytest.raises(ValueError, match="FLASHATTN_CHECK is 'always', expected 'once' or 'never'"):
        verdict(a_gpu("a 1"))


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(file.read_bytes()[:-3]), lambda file: file.unlink()])
def test_a_broken_file_is_not_believed(verdict, tmp_path, damage):
    verdict(a_gpu("a 1"))
    [file] = (tmp_path / "checked").iterdir()
    damage(file)
    assert verdict(a_gpu("a 1")) == ("", 1)


# --- The checks that doctor starts ---------------------------------------------------------------------------


def test_each_kernel_of_a_backend_is_asked_for_what_it_takes(monkeypatch):
    asked = []
    monkeypatch.setattr(compare, "of_call", lambda call, variant, stream: asked.append((variant, call)) or "")
    found = list(survey.of_backend("cpu"))
    models = list(survey.calls_of_models())
    quantised = sum(call.bits > 0 for call in models)
    assert found == [
        ("cpu_decode", len(models), ""),
        ("cpu_prefill", len(models), ""),
        ("cpu_backward", len(models) - quantised, ""),
    ]
    assert len(asked) == sum(count for _, count, _ in found)
    assert {call.query_len for variant, call in asked if variant.kernel is _ext.Kernel.cpu_decode} == {1}


def test_what_a_kernel_of_a_backend_fails_at(monkeypatch):
    def wrong(call, variant, stream):
        if variant.kernel is _ext.Kernel.cpu_prefill:
            raise MemoryError("no memory to check a kernel")
        is_wrong = variant.kernel is _ext.Kernel.cpu_decode and call.dtype == mx.float32
        return f"{call.head_dim} fails" if is_wrong else ""

    monkeypatch.setattr(compare, "of_call", wrong)
    found = {kernel: wrong for kernel, _, wrong in survey.of_backend("cpu")}
    assert found == {"cpu_decode": "64 fails", "cpu_prefill": "no memory to check a kernel", "cpu_backward": ""}
