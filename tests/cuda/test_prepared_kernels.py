"""The kernels that a kind of call runs are compiled when the kind is settled."""

import mlx.core as mx
import pytest
from flashattn_core import decide
from flashattn_core.arguments import lowered
from flashattn_core.masks import SlidingWindow

from tests import launches


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "never")


@pytest.fixture
def checked(unchecked, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHATTN_CHECK", "once")
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(decide, "_verdicts", {})


def wanted(length=40, key_len=50, dim=64, dtype=mx.bfloat16, mask="causal", refuses=False):
    query, key = (mx.zeros((1, heads, rows, dim), dtype) for heads, rows in ((4, length), (2, key_len)))
    return launches.decision(lowered(query, key, key, None, mask), refuses=refuses)[1]


def test_a_refusal_is_an_error_while_there_is_a_choice():
    for _ in range(2):  # a refused kernel does not count as prepared
        with pytest.raises(ValueError, match="the driver's own words"):
            wanted(dim=72, refuses=True)


@pytest.mark.parametrize(
    "change",
    [{}, {"length": 1}, {"dim": 80}, {"dtype": mx.float32}, {"mask": None}, {"mask": SlidingWindow(9)}],
    ids=str,
)
def test_each_kind_of_call_asks_for_a_function(change):
    assert len(wanted(**change)) == 1


@pytest.mark.parametrize("precision", ["float32", "input"])
def test_what_is_compiled_is_what_runs(precision):
    query, key = (mx.zeros((1, heads, rows, 64), mx.bfloat16) for heads, rows in ((4, 100), (2, 300)))
    call = lowered(query, key, key, None, "causal", precision=precision)
    for capability in (0, 90):
        with launches.shared_memory(227, capability):
            [launch] = launches.forward(call, "cuda")
            assert launches.decision(call)[1] == [launch["function"]]


def test_of_a_traced_call_the_gradient_is_compiled_too():
    key, found = mx.zeros((1, 2, 300, 64), mx.bfloat16), []

    def traced(query):
        found.extend(launches.decision(lowered(query, key, key, None, "causal"))[1])
        return query.sum()

    mx.grad(traced)(mx.zeros((1, 4, 100, 64), mx.bfloat16))
    assert [name.split("_bfloat")[0] for name in found] == [
        "cuda_prefill", "cuda_backward_delta", "cuda_backward", "cuda_backward", "cuda_backward_merge",
    ]  # fmt: skip


def test_a_metal_kernel_is_compiled_by_mlx():
    query = mx.zeros((1, 2, 100, 64))
    assert launches.decision(lowered(query, query, query), "metal")[1] == []


@pytest.mark.usefixtures("checked")
def test_for_the_check_all_that_the_kernel_has_is_compiled_first():
    asked = []
    query = mx.zeros((1, 2, 100, 64), mx.bfloat16)
    _, functions = launches.decision(lowered(query, query, query), check=lambda kernel: asked.append(kernel) or "")
    assert asked == ["cuda_prefill"]
    assert len(functions) > 1


@pytest.mark.usefixtures("checked")
def test_what_does_not_compile_is_for_the_check_to_say():
    query = mx.zeros((1, 2, 100, 64), mx.bfloat16)
    decision, _ = launches.decision(
        lowered(query, query, query, kernel="cuda_rowwise"), check=lambda kernel: "it does not compile", refuses=True
    )
    assert (decision.kernel, decision.wrong) == (None, "it does not compile")
