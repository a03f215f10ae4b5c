"""parakeet-mlx: the encoder gives the same results with flash attention, which reads its positional bias in place."""

import pytest

pytestmark = pytest.mark.nightly("installs parakeet-mlx")

CASES = ("relative_positions", "two_minutes", "plain")


@pytest.fixture(scope="module")
def arms(arms_of):
    return arms_of("parakeet_models", "parakeet-mlx==0.7.0")


@pytest.mark.parametrize("case", CASES)
def test_the_same_results(arms, case):
    """Results in float32 agree; the largest difference seen was 2e-6."""
    assert arms.error(case) < 1e-5
    assert arms.kernels(case) == {"cpu_prefill": 2}


@pytest.mark.parametrize("case", CASES)
def test_under_the_command(arms, case):
    assert arms.error(case, "run") < 1e-5
    assert arms.run_kernels == arms.all_kernels()


def test_a_long_recording_takes_less_memory(arms):
    """The scores of two recordings, 4 heads and 1,500 queries take 72 MB, and so does the program's bias."""
    off, on = arms.memory("two_minutes")
    assert off - on > 0.9 * 2 * 4 * 1500**2 * 4 / 1e6
