"""Problems for attention kernels: what a call computes, reads and holds."""

from dataclasses import replace

import numpy as np
import pytest
from flash_evals.workload import Pass, Workload
from kernel_cases import WORKLOADS, visible_in, workload

pytestmark = pytest.mark.usefixtures("quick_machine")


@pytest.mark.parametrize("work", WORKLOADS, ids=str)
def test_counts_what_is_visible(work: Workload) -> None:
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


def test_16_bit_numbers_are_half_as_long() -> None:
    single, half = workload(query_len=16), workload(query_len=16, dtype="bfloat16")
    lse = 4 * 4 * 16
    assert single.bytes_held == 4 * 8 * (2 * 4 * 16 + 2 * 2 * 32) + lse
    assert half.bytes_held - lse == (single.bytes_held - lse) // 2
    assert half.bytes_read == single.bytes_read // 2


@pytest.mark.parametrize("pass_", ["backward", "forward_backward"])
def test_gradients_are_held_beside_what_they_are_of(pass_: Pass) -> None:
    """And the output's cotangent beside the output, but none beside lse."""
    forward, work = workload(query_len=16), workload(query_len=16, pass_=pass_)
    lse = 4 * 4 * 16
    assert work.bytes_held - lse == 2 * (forward.bytes_held - lse)


def test_the_seed_decides_the_numbers() -> None:
    def query(seed: int) -> list[float]:
        return workload().inputs(seed)[0].ravel().tolist()

    assert query(0) == query(0) != query(1)
