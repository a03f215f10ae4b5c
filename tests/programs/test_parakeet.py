"""parakeet-mlx: its encoder gives the same with flash attention, which reads the bias of positions in place."""

import pytest

pytestmark = pytest.mark.nightly("installs parakeet-mlx")

CASES = ("relative_positions", "two_minutes", "plain")


@pytest.fixture(scope="module")
def arms(arms_of):
    return arms_of("parakeet_models", "parakeet-mlx==0.7.0")


@pytest.mark.parametrize("case", CASES)
def test_the_same_results(arms, case):
    """In float32. 2e-6 is the most that was seen."""
    assert arms.error(case) < 1e-5
    assert arms.kernels(case) == {"cpu_prefill": 2}


@pytest.mark.parametrize("case", CASES)
def test_under_the_command(arms, case):
    assert arms.error(case, "run") < 1e-5
    assert arms.run_kernels == arms.all_kernels()


def test_a_long_recording_takes_less_memory(arms):
    """The scores of two recordings, 4 heads and 1,500 queries are 72 MB. So is the bias, which the program makes."""
    off, on = arms.memory("two_minutes")
    assert off - on > 0.9 * 2 * 4 * 1500**2 * 4 / 1e6
