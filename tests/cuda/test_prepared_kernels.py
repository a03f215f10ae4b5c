"""When the attention kernel for a call is chosen, all kernels that the call will run are compiled."""

import mlx.core as mx
import pytest
from flashattn_core import decide
from flashattn_core.arguments import lowered
from flashattn_core.masks import SlidingWindow

from tests import launches
from tests.gpu_calls import lowered_call


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "never")


@pytest.fixture
def checked(unchecked, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHATTN_CHECK", "once")
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(decide, "_verdicts", {})


def test_a_refusal_is_an_error_while_there_is_a_choice():
    for _ in range(2):  # the second call fails, too: a refused kernel is not remembered as compiled
        with pytest.raises(ValueError, match="the driver's own words"):
            launches.decision(lowered_call(dim=72), refuses=True)


CHANGES = [{}, {"length": 1}, {"dim": 80}, {"dtype": mx.float32}, {"mask": None}, {"mask": SlidingWindow(9)}]


@pytest.mark.parametrize("change", [*CHANGES, {"precision": "input"}], ids=str)
def test_what_is_compiled_is_what_runs(change):
    call = lowered_call(**change)
    for capability in (0, 90):
        with launches.shared_memory(227, capability):
            functions = [launch["function"] for launch in launches.forward(call, "cuda")]
            assert launches.decision(call)[1] == functions
            assert len(functions) == 1 or (change == {"dtype": mx.float32} and capability == 90)


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
    assert launches.decision(lowered_call(), "metal")[1] == []


@pytest.mark.usefixtures("checked")
def test_for_the_check_all_that_the_kernel_has_is_compiled_first():
    asked = []
    _, functions = launches.decision(lowered_call(mask=None), check=lambda kernel: asked.append(kernel) or "")
    assert asked == ["cuda_prefill"]
    assert len(functions) > 1


@pytest.mark.usefixtures("checked")
def test_what_does_not_compile_is_for_the_check_to_say():
    call = lowered_call(mask=None, kernel="cuda_rowwise")
    decision, _ = launches.decision(call, check=lambda kernel: "it does not compile", refuses=True)
    assert (decision.kernel, decision.wrong) == (None, "it does not compile")
