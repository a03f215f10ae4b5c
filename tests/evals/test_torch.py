"""PyTorch among the implementations, in a shape that needs no PyTorch: what it is asked for."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import implementations
from flash_evals.workload import PASSES

pytestmark = pytest.mark.usefixtures("quick_machine")


class FakeTensor:
    def __init__(self, array, dtype="as given", requires_grad=False, graph=None):
        self.array, self.dtype, self.requires_grad = array, dtype, requires_grad
        self.graph = graph  # the function that attention was, and what it was given

    def requires_grad_(self, requires_grad):
        self.requires_grad = requires_grad

    def to(self, dtype):
        return FakeTensor(self.array, dtype)

    def detach(self):
        array = SimpleNamespace(numpy=lambda: self.array)  # torch refuses what is not detached
        return SimpleNamespace(float=lambda: array)


class FakeTorch:
    """What of torch is used. Its attention has torch's mask: causal is aligned to the upper left."""

    def __init__(self):
        self.calls = []
        self.threads = []
        self.gradients = 0
        self.float32, self.bfloat16 = "float32", "bfloat16"
        self.tensor = FakeTensor
        self.set_num_threads = self.threads.append
        self.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=self.attention))
        self.autograd = SimpleNamespace(grad=self.grad)

    def attention(self, *inputs, attn_mask, is_causal, enable_gqa):
        assert not (is_causal and attn_mask is not None)
        assert enable_gqa
        query, key, _ = inputs
        recorded = query.requires_grad
        asked = {"is_causal": is_causal, "masked": attn_mask is not None, "recorded": recorded}
        self.calls.append(asked | {"dtypes": {tensor.dtype for tensor in inputs}})
        visible = np.ones((query.array.shape[-2], key.array.shape[-2]), bool) if attn_mask is None else attn_mask.array
        mask = mx.array(np.tril(visible) if is_causal else visible)
        scale = query.array.shape[-1] ** -0.5

        def attend(q, k, v):
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

        output = np.array(attend(*(mx.array(tensor.array) for tensor in inputs)))
        return FakeTensor(output, requires_grad=recorded, graph=(attend, list(inputs)) if recorded else None)

    def grad(self, output, inputs, cotangent):
        """Frees the graph, as torch does."""
        (attend, operands), output.graph = output.graph, None
        assert inputs == operands
        assert all(tensor.requires_grad for tensor in inputs)
        assert not cotangent.requires_grad
        self.gradients += 1
        _, gradients = mx.vjp(attend, [mx.array(tensor.array) for tensor in inputs], [mx.array(cotangent.array)])
        return [FakeTensor(np.array(gradient)) for gradient in gradients]


@pytest.fixture
def torch(monkeypatch):
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
        (["--query-len", 1], False, False),
        (["--window", 7, "--query-len", 1], False, True),
    ],
)
def test_torch_is_asked_for_the_same(run_kernels, torch, options, is_causal, masked, pass_):
    """And agrees, or the run would end."""
    if pass_ != "forward" and options[-2:] == ["--query-len", 1]:
        return  # kernels refuses it
    entries, _ = run_kernels("--impl", "flash,torch", "--pass", pass_, *options)
    assert [entry["config"]["impl"] for entry in entries] == ["flash", "torch"]
    recorded = pass_ != "forward"
    asked = {"is_causal": is_causal, "masked": masked, "dtypes": {"float32"}, "recorded": recorded}
    assert torch.calls[-1] == asked
    assert torch.gradients == (len(torch.calls) if recorded else 0)
    assert set(torch.threads) == {implementations.threads()}
    assert entries[0]["machine"]["versions"]["torch"] == "that of torch"


def test_torch_takes_part_where_it_is_installed_and_gets_the_dtype(run_kernels, torch):
    assert [entry["config"]["impl"] for entry in run_kernels()[0]] == ["flash", "mlx", "naive", "torch"]
    run_kernels("--impl", "torch", "--dtype", "bfloat16")
    assert torch.calls[-1]["dtypes"] == {"bfloat16"}
