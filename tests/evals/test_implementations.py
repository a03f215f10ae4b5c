"""All implementations in `flash-eval kernels` give the same results. Operations and bytes are counted correctly."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import flashattn_core
import mlx.core as mx
import numpy as np
import pytest
from flash_evals.results.workload import PASSES, Workload
from flash_evals.work import implementations, machine
from flash_evals.work.implementations import IMPLEMENTATIONS, QUANTISED, RESULTS
from flashattn_core.masks import Causal, SlidingWindow
from flashattn_core.reference import visible_and_bias
from msgspec.structs import replace

from tests.core.gradient_oracle import Call, unfused_gradients

pytestmark = pytest.mark.usefixtures("quick_machine")


workload = partial(replace, Workload(1, 32, 32, 4, 2, 8, True, None, "float32", None))
WORKLOADS = [
    workload(),
    workload(causal=False),
    workload(causal=False, query_len=40, batch_size=3),
    workload(query_len=5),
    workload(query_len=1),
    workload(window=1),
    workload(window=7, query_len=9, batch_size=2),
    workload(window=7, query_len=1),
    workload(window=100),
    workload(num_heads=6, num_kv_heads=6, head_dim=16, seq_len=33, query_len=2),
]
CASES = [(name, pass_, work) for name in ("flash", "mlx", "naive") for pass_ in PASSES for work in WORKLOADS]
CASES += [
    (name, "forward", workload(head_dim=64, kv_bits=8, **changes))
    for name in QUANTISED
    for changes in ({}, {"causal": False}, {"window": 7, "query_len": 9})
]


def mask_of(work):
    return SlidingWindow(work.window) if work.window else Causal() if work.causal else None


@pytest.mark.parametrize(("name", "pass_", "work"), CASES, ids=str)
def test_every_implementation_computes_the_workload(name, pass_, work):
    inputs = work.inputs(seed=1)
    contestant = IMPLEMENTATIONS[name](work, pass_, inputs)
    calls = [contestant.prepare() for _ in range(3)]
    results = contestant.as_numpy(contestant.compute(calls))
    assert calls == []  # compute() removes each call that it runs
    arrays = list(map(mx.array, inputs))
    if work.kv_bits:
        arrays[1:3] = [mx.dequantize(*mx.quantize(x, 64, 8), group_size=64, bits=8) for x in arrays[1:3]]
    call = Call(*arrays, mask=mask_of(work))
    output, gradients = call.forward()[0], unfused_gradients(call)
    expected = dict(zip(RESULTS["forward_backward"], (output, gradients.dq, gradients.dk, gradients.dv), strict=True))
    for what, result in zip(RESULTS[pass_], results, strict=True):
        np.testing.assert_allclose(result, expected[what], atol=1e-5, err_msg=what)


@pytest.mark.parametrize("name", ["flash", "mlx", "naive"])
def test_a_backward_pass_begins_after_the_forward_pass(name):
    """For a backward pass, prepare() runs the forward pass. flash keeps the output and lse. The other implementations
    keep the matrix of probabilities.
    """
    work = workload(query_len=256, seq_len=256)
    contestant = IMPLEMENTATIONS[name](work, "backward", work.inputs(seed=0))
    mx.synchronize()
    before = mx.get_active_memory()
    flashattn_core.reset_stats()
    call = contestant.prepare()
    kept = 4 * 256 * (8 + 1) * 4 if name == "flash" else 4 * 256 * 256 * 4
    assert mx.get_active_memory() - before >= kept
    prepared = flashattn_core.stats()
    contestant.compute([call])
    ran = {kernel: calls - prepared[kernel] for kernel, calls in flashattn_core.stats().items()}
    assert sum(ran.values()) == ran["cpu_backward"] == (name == "flash")


def test_threads_are_those_of_flash(monkeypatch):
    for text, number in (("AVX2, 1 thread", 1), ("AVX-512, 32 threads", 32)):
        monkeypatch.setattr(flashattn_core, "backends", lambda text=text: {"cpu": text})
        assert implementations.threads() == number


@pytest.mark.parametrize("work", WORKLOADS, ids=str)
def test_counts_what_is_visible(work):
    """Operations and bytes are counted only for keys that the reference's mask does not hide."""
    shape = (work.batch_size, work.num_heads, work.query_len, work.head_dim)
    visible = visible_and_bias(shape, work.seq_len, mask_of(work))[0][0, 0]
    mask = work.mask()
    assert visible.all() if mask is None else np.array_equal(mask, visible) and not visible.all()
    for pass_, products in (("forward", 2), ("backward", 5), ("forward_backward", 7)):
        flops = 2 * products * work.head_dim * visible.sum() * work.num_heads * work.batch_size
        assert work.flops(pass_) == flops
    assert work.bytes_read == 2 * work.batch_size * work.num_kv_heads * visible.any(axis=0).sum() * work.head_dim * 4


@pytest.mark.parametrize(
    ("changes", "bytes_of_key", "bytes_of_number"),
    [({}, 4 * 128, 4), ({"dtype": "bfloat16"}, 2 * 128, 2), ({"kv_bits": 4}, 128 // 2 + 2 * 2 * 4, 4)],
)
def test_what_is_held_and_read(changes, bytes_of_key, bytes_of_number):
    """A forward pass holds inputs, output and lse. A pass with gradients also holds the gradients of inputs and output.
    lse has no gradient. Quantised keys have a scale and a bias for each 64 numbers.
    """
    work = workload(head_dim=128, query_len=16, **changes)
    assert work.bytes_read == 2 * 2 * 32 * bytes_of_key
    lse, held = 4 * 4 * 16, 2 * 4 * 16 * 128 * bytes_of_number + work.bytes_read
    assert [work.bytes_held(pass_) - lse for pass_ in PASSES] == [held, 2 * held, 2 * held]


def test_the_seed_decides_the_numbers(run_kernels, fake_implementation):
    outputs = []
    fake_implementation("flash", output=lambda array: outputs.append(array.tolist()) or array)
    for seed in (0, 0, 1):
        run_kernels("--impl", "flash", "-r", 1, "--seed", seed)
    assert outputs[0] == outputs[1] != outputs[2]


# The implementation `torch` calls PyTorch. The tests replace PyTorch by functions of MLX.


class FakeTensor:
    def __init__(self, array, dtype="as given", graph=None):
        self.array, self.dtype, self.requires_grad = mx.array(array), dtype, False
        self.graph = graph  # grad() needs the attention function and its inputs

    def requires_grad_(self, requires_grad):
        self.requires_grad = requires_grad

    def to(self, dtype):
        return FakeTensor(self.array, dtype)

    def detach(self):
        array = SimpleNamespace(numpy=lambda: np.array(self.array))  # PyTorch converts only detached tensors
        return SimpleNamespace(float=lambda: array)


def attention(*inputs, attn_mask, is_causal, enable_gqa):
    """Attention as in PyTorch, whose causal mask is aligned at the upper left."""
    assert enable_gqa
    arrays = [tensor.array for tensor in inputs]
    mask = attn_mask and attn_mask.array
    if is_causal:
        assert mask is None
        mask = mx.tril(mx.ones((arrays[0].shape[-2], arrays[1].shape[-2]))).astype(mx.bool_)
    attend = partial(mx.fast.scaled_dot_product_attention, scale=arrays[0].shape[-1] ** -0.5, mask=mask)
    return FakeTensor(attend(*arrays), graph=(attend, list(inputs)) if inputs[0].requires_grad else None)


def grad(output, inputs, cotangent):
    """The gradients of attention. Frees the graph, as PyTorch does."""
    (attend, operands), output.graph = output.graph, None
    assert inputs == operands
    assert [tensor.requires_grad for tensor in (*inputs, cotangent)] == [True, True, True, False]
    _, gradients = mx.vjp(attend, [tensor.array for tensor in inputs], [cotangent.array])
    return list(map(FakeTensor, gradients))


@pytest.fixture
def torch(monkeypatch):
    fake = Mock(float32="float32", bfloat16="bfloat16", tensor=FakeTensor)
    fake.nn.functional.scaled_dot_product_attention.side_effect = attention
    fake.autograd.grad.side_effect = grad
    monkeypatch.setattr(implementations, "find_spec", lambda name: name)
    monkeypatch.setattr(implementations, "import_module", {"torch": fake}.__getitem__)
    monkeypatch.setattr(machine, "version", lambda package: f"that of {package}")
    return fake


@pytest.mark.parametrize(
    ("options", "is_causal", "masked", "passes"),
    [
        ([], True, False, PASSES),
        (["--no-causal"], False, False, PASSES),
        (["--query-len", 5], False, True, PASSES),  # is_causal=True would align the mask at the upper left
        (["--window", 7], False, True, PASSES),
        (["--window", 7, "--query-len", 5], False, True, PASSES),
        (["--query-len", 1], False, False, ["forward"]),
        (["--window", 7, "--query-len", 1], False, True, ["forward"]),
        (["--dtype", "bfloat16"], True, False, ["forward"]),
    ],
)
def test_torch_is_asked_for_the_same(run_kernels, torch, options, is_causal, masked, passes):
    """The arguments make PyTorch compute the same as flash attention. The command fails if results differ. Before each
    backward pass, PyTorch runs a forward pass.
    """
    asked = torch.nn.functional.scaled_dot_product_attention
    for pass_ in passes:
        asked.reset_mock()
        entries, _ = run_kernels("--impl", "flash,torch", "--pass", pass_, *options)
        assert entries[1]["machine"]["versions"]["torch"] == "that of torch"
        for inputs, how in asked.call_args_list:
            assert (how["is_causal"], how["attn_mask"] is not None) == (is_causal, masked)
            assert {tensor.dtype for tensor in inputs} == {entries[1]["config"]["dtype"]}
            assert {tensor.requires_grad for tensor in inputs} == {pass_ != "forward"}
        assert torch.autograd.grad.call_count == (pass_ != "forward") * asked.call_count
        torch.autograd.grad.reset_mock()
    torch.set_num_threads.assert_called_with(implementations.threads())


def test_torch_takes_part_on_a_cpu_where_it_is_installed(run_kernels, refused, torch, monkeypatch):
    assert [entry["config"]["impl"] for entry in run_kernels()[0]] == ["flash", "mlx", "naive", "torch"]
    monkeypatch.setattr(machine, "kind", lambda: "gpu")
    monkeypatch.setattr(machine, "describe", None)
    assert "--impl torch needs MLX's CPU device" in refused("kernels", "--impl", "torch")
