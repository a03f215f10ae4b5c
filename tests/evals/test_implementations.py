"""Workloads for attention kernels: what a call computes, reads and holds, and that each implementation does that."""

from dataclasses import replace

import flashattn_core
import mlx.core as mx
import numpy as np
import pytest
from flash_evals import implementations
from flash_evals.implementations import IMPLEMENTATIONS, RESULTS
from flash_evals.workload import PASSES, Heads
from flashattn_core.reference import reference_attention
from gradient_oracle import Call, unfused_gradients
from kernel_cases import WORKLOADS, mask_of, visible_in, workload

pytestmark = pytest.mark.usefixtures("quick_machine")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("name", ["flash", "mlx", "naive"])
@pytest.mark.parametrize("work", WORKLOADS, ids=str)
def test_every_implementation_computes_the_workload(name, work, pass_):
    inputs = work.inputs(seed=1)
    contestant = IMPLEMENTATIONS[name](replace(work, pass_=pass_), inputs)
    results = contestant.as_numpy(contestant.run([contestant.prepare() for _ in range(2)]))
    call = Call(*map(mx.array, inputs), mask=mask_of(work))
    output, lse = call.forward()
    gradients = unfused_gradients(call, output, lse)
    expected = dict(zip(RESULTS["forward_backward"], (output, gradients.dq, gradients.dk, gradients.dv), strict=True))
    for what, result in zip(RESULTS[pass_], results, strict=True):
        np.testing.assert_allclose(result, expected[what], atol=1e-5, err_msg=what)


@pytest.mark.parametrize("name", ["flash", "mlx", "naive"])
def test_a_backward_pass_begins_after_the_forward_pass(name):
    """Whose kept arrays are there when it is prepared: flash's output and lse, the others' weights."""
    work = workload(query_len=256, seq_len=256, pass_="backward")
    contestant = IMPLEMENTATIONS[name](work, work.inputs(seed=0))
    mx.synchronize()
    before = mx.get_active_memory()
    flashattn_core.reset_stats()
    call = contestant.prepare()
    kept = 4 * 256 * (8 + 1) * 4 if name == "flash" else 4 * 256 * 256 * 4
    assert mx.get_active_memory() - before >= kept
    prepared = flashattn_core.stats()
    contestant.run([call])
    ran = {kernel: calls - prepared[kernel] for kernel, calls in flashattn_core.stats().items()}
    assert sum(ran.values()) == (name == "flash")
    assert ran["cpu_backward"] == (name == "flash")


@pytest.mark.parametrize("pass_", PASSES)
def test_calls_are_gone_when_they_have_run(pass_):
    work = workload(pass_=pass_)
    contestant = IMPLEMENTATIONS["flash"](work, work.inputs(seed=0))
    calls = [contestant.prepare() for _ in range(3)]
    contestant.run(calls)
    assert calls == []


def test_threads_are_those_of_flash(monkeypatch):
    for text, number in (("AVX2, 1 thread", 1), ("AVX-512, 32 threads", 32)):
        monkeypatch.setattr(flashattn_core, "backends", lambda text=text: {"cpu": text})
        assert implementations.threads() == number


def test_what_is_held_and_read():
    """Of gradients as much as of what they are of, but of lse none; packed, a scale and a bias for each 64 numbers."""
    single, half = workload(query_len=16), workload(query_len=16, dtype="bfloat16")
    backward, lse = workload(query_len=16, pass_="backward"), 4 * 4 * 16
    assert single.bytes_held == 4 * 8 * (2 * 4 * 16 + 2 * 2 * 32) + lse
    assert half.bytes_held - lse == (single.bytes_held - lse) // 2
    assert half.bytes_read == single.bytes_read // 2
    assert backward.bytes_held - lse == 2 * (single.bytes_held - lse)
    assert replace(backward, pass_="forward_backward").bytes_held == backward.bytes_held
    plain, packed = workload(heads=Heads(4, 2, 128)), workload(heads=Heads(4, 2, 128), kv_bits=4)
    rows = 2 * 4 * 32 * 128 * 4 + 4 * 4 * 32
    assert plain.bytes_read == 2 * 2 * 32 * 128 * 4
    assert packed.bytes_read == 2 * 2 * 32 * (128 // 2 + 2 * 2 * 4)
    assert packed.bytes_held - rows == packed.bytes_read
    assert "4-bit keys and values" in str(packed)


@pytest.mark.parametrize("name", implementations.QUANTISED)
@pytest.mark.parametrize("work", [workload(), workload(causal=False), workload(window=7, query_len=9)], ids=str)
def test_quantised_outputs(name, work):
    work = replace(work, heads=Heads(4, 2, 64), kv_bits=8)
    inputs = work.inputs(0)
    contestant = IMPLEMENTATIONS[name](work, inputs)
    (output,) = contestant.as_numpy(contestant.run([contestant.prepare() for _ in range(3)]))
    query, *others = inputs[:3]
    floats = (mx.dequantize(*mx.quantize(mx.array(x), 64, 8), group_size=64, bits=8) for x in others)
    expected, _ = reference_attention(query, *map(np.array, floats), None, mask_of(work))
    np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.parametrize("work", WORKLOADS, ids=str)
def test_counts_what_is_visible(work):
    visible = visible_in(work)
    given = work.visible()
    assert (given is None) == visible.all()
    if given is not None:
        np.testing.assert_array_equal(given, visible)
    for pass_, products in (("forward", 2), ("backward", 5), ("forward_backward", 7)):
        flops = 2 * products * work.heads.dim * visible.sum() * work.heads.query * work.batch_size
        assert replace(work, pass_=pass_).flops == flops
    seen = visible.any(axis=0).sum()
    assert work.bytes_read == 2 * work.batch_size * work.heads.kv * seen * work.heads.dim * 4


def test_the_seed_decides_the_numbers():
    def query(seed):
        return workload().inputs(seed)[0].ravel().tolist()

    assert query(0) == query(0) != query(1)
