"""Each implementation computes the workload that it is given, in each pass, and nothing beside it."""

from dataclasses import replace

import flashattn_core
import mlx.core as mx
import numpy as np
import pytest
from flash_evals import implementations
from flash_evals.implementations import GRADIENTS, IMPLEMENTATIONS, RESULTS
from flash_evals.workload import PASSES, Pass, Workload
from flashattn_core.reference import reference_attention
from kernel_cases import WORKLOADS, mask_of, visible_in, workload

pytestmark = pytest.mark.usefixtures("quick_machine")


def gradients_of(work: Workload, seed: int) -> list[np.ndarray]:
    """Of query, key and value, by the formula in float64."""
    query, key, value, cotangent = (array.astype(np.float64) for array in work.inputs(seed))
    grouped = (work.batch_size, work.heads.kv, -1, work.query_len, work.heads.dim)
    query, cotangent = query.reshape(grouped), cotangent.reshape(grouped)
    key, value = key[:, :, None], value[:, :, None]
    scale = work.heads.dim**-0.5
    scores = np.where(visible_in(work), query @ key.swapaxes(-1, -2) * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_weights = cotangent @ value.swapaxes(-1, -2)
    of_scores = weights * (of_weights - (weights * of_weights).sum(axis=-1, keepdims=True)) * scale
    return [
        (of_scores @ key).reshape(work.batch_size, work.heads.query, work.query_len, work.heads.dim),
        (of_scores.swapaxes(-1, -2) @ query).sum(axis=2),
        (weights.swapaxes(-1, -2) @ cotangent).sum(axis=2),
    ]


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("name", ["flash", "mlx", "naive"])
@pytest.mark.parametrize("work", WORKLOADS, ids=str)
def test_every_implementation_computes_the_workload(name: str, work: Workload, pass_: Pass) -> None:
    inputs = work.inputs(seed=1)
    contestant = IMPLEMENTATIONS[name](replace(work, pass_=pass_), inputs)
    results = contestant.as_numpy(contestant.run([contestant.prepare() for _ in range(2)]))
    output, _ = reference_attention(*inputs[:3], mask=mask_of(work))
    expected = {"output": output, **dict(zip(GRADIENTS, gradients_of(work, seed=1), strict=True))}
    for what, result in zip(RESULTS[pass_], results, strict=True):
        np.testing.assert_allclose(result, expected[what], atol=1e-5, err_msg=what)


@pytest.mark.parametrize("name", ["flash", "mlx", "naive"])
def test_a_backward_pass_begins_after_the_forward_pass(name: str) -> None:
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
def test_calls_are_gone_when_they_have_run(pass_: Pass) -> None:
    work = workload(pass_=pass_)
    contestant = IMPLEMENTATIONS["flash"](work, work.inputs(seed=0))
    calls = [contestant.prepare() for _ in range(3)]
    contestant.run(calls)
    assert calls == []


def test_threads_are_those_of_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, number in (("AVX2, 1 thread", 1), ("AVX-512, 32 threads", 32)):
        monkeypatch.setattr(flashattn_core, "backends", lambda text=text: {"cpu": text})
        assert implementations.threads() == number
