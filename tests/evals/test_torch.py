"""PyTorch among the implementations, in a shape that needs no PyTorch: what it is asked for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import implementations
from flash_evals.workload import PASSES, Pass
from flashattn_core.reference import reference_attention

pytestmark = pytest.mark.usefixtures("quick_machine")


class FakeTensor:
    def __init__(self, array: np.ndarray, dtype: str = "as given") -> None:
        self.array, self.dtype = array, dtype
        self.requires_grad = False
        self.graph: tuple[list[FakeTensor], mx.array] | None = None  # what attention was computed from, and its mask

    def requires_grad_(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad

    def detach(self) -> "FakeTensor":
        return FakeTensor(self.array, self.dtype)

    def to(self, dtype: str) -> "FakeTensor":
        return FakeTensor(self.array, dtype)

    def float(self) -> "FakeTensor":
        return self

    def numpy(self) -> np.ndarray:
        assert not self.requires_grad  # torch refuses it
        return self.array


class FakeTorch:
    """What of torch is used. Its attention has torch's mask: causal is aligned to the upper left."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.threads: list[int] = []
        self.gradients = 0
        self.float32, self.bfloat16 = "float32", "bfloat16"
        self.tensor = FakeTensor
        self.set_num_threads = self.threads.append
        self.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=self.attention))
        self.autograd = SimpleNamespace(grad=self.grad)

    def attention(
        self,
        query: FakeTensor,
        key: FakeTensor,
        value: FakeTensor,
        *,
        attn_mask: Any,
        is_causal: bool,
        enable_gqa: bool,
    ) -> FakeTensor:
        assert not (is_causal and attn_mask is not None)
        assert enable_gqa
        dtypes = {tensor.dtype for tensor in (query, key, value)}
        recorded = query.requires_grad
        self.calls.append(
            {"is_causal": is_causal, "masked": attn_mask is not None, "dtypes": dtypes, "recorded": recorded}
        )
        visible = np.ones((query.array.shape[-2], key.array.shape[-2]), bool) if attn_mask is None else attn_mask.array
        mask = mx.array(np.tril(visible) if is_causal else visible)
        out, _ = reference_attention(query.array, key.array, value.array, mask=mask)
        output = FakeTensor(out.astype(np.float32))
        if recorded:
            output.requires_grad, output.graph = True, ([query, key, value], mask)
        return output

    def grad(self, output: FakeTensor, inputs: list[FakeTensor], cotangent: FakeTensor) -> list[FakeTensor]:
        """Frees the graph, as torch does."""
        assert output.graph is not None
        (operands, mask), output.graph = output.graph, None
        assert inputs == operands
        assert all(tensor.requires_grad for tensor in inputs)
        assert not cotangent.requires_grad

        def attention(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
            return mx.fast.scaled_dot_product_attention(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)

        arrays, [of_output] = ([mx.array(tensor.array) for tensor in tensors] for tensors in (inputs, [cotangent]))
        self.gradients += 1
        return [FakeTensor(np.array(gradient)) for gradient in mx.vjp(attention, arrays, [of_output])[1]]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr(implementations, "find_spec", lambda name: name)
    monkeypatch.setattr(implementations, "import_module", {"torch": fake}.__getitem__)
    monkeypatch.setattr("flash_evals.machine.version", lambda package: f"that of {package}")
    return fake


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    ("options", "is_causal", "masked"),
    [
        ([], True, False),
        (["--no-causal"], False, False),
        (["--query-len", 5], False, True),  # its own causal mask would be aligned to the other corner
        (["--window", 7], False, True),
        (["--window", 7, "--query-len", 5], False, True),
    ],
)
def test_torch_is_asked_for_the_same(
    run_kernels: Callable[..., Any], torch: FakeTorch, options: list[object], is_causal: bool, masked: bool, pass_: Pass
) -> None:
    """And agrees, or the run would end."""
    entries, _ = run_kernels("--impl", "flash,torch", "--pass", pass_, *options)
    assert [entry["config"]["impl"] for entry in entries] == ["flash", "torch"]
    recorded = pass_ != "forward"
    asked = {"is_causal": is_causal, "masked": masked, "dtypes": {"float32"}, "recorded": recorded}
    assert torch.calls[-1] == asked
    assert torch.gradients == (len(torch.calls) if recorded else 0)
    assert set(torch.threads) == {implementations.threads()}
    assert entries[0]["machine"]["versions"]["torch"] == "that of torch"


@pytest.mark.parametrize(("options", "masked"), [([], False), (["--window", 7], True)])
def test_torch_is_asked_for_a_decode_step(
    run_kernels: Callable[..., Any], torch: FakeTorch, options: list[object], masked: bool
) -> None:
    run_kernels("--impl", "flash,torch", "--query-len", 1, *options)
    assert torch.calls[-1] == {"is_causal": False, "masked": masked, "dtypes": {"float32"}, "recorded": False}


def test_torch_gets_the_dtype(run_kernels: Callable[..., Any], torch: FakeTorch) -> None:
    run_kernels("--impl", "torch", "--dtype", "bfloat16")
    assert torch.calls[-1]["dtypes"] == {"bfloat16"}


def test_torch_takes_part_where_it_is_installed(run_kernels: Callable[..., Any], torch: FakeTorch) -> None:
    assert [entry["config"]["impl"] for entry in run_kernels()[0]] == ["flash", "mlx", "naive", "torch"]
