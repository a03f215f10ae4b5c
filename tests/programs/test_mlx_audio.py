"""mlx-audio: a recogniser of speech gives the same with flash attention."""

import pytest

pytestmark = pytest.mark.long("installs mlx-audio")

KERNELS = {
    "qwen3_asr": {"cpu_prefill": 2 + 2, "cpu_decode": 3 * 2},
    "whisper_writes_attention_out": {},
}


@pytest.fixture(scope="module")
def arms(arms_of):
    return arms_of("mlx_audio_models", "mlx-audio==0.6.2")


@pytest.mark.parametrize("case", KERNELS)
def test_the_same_results(arms, case):
    """In float32. 7e-7 is the most that was seen."""
    assert arms.error(case) < 1e-5
    assert arms.kernels(case) == KERNELS[case]


@pytest.mark.parametrize("case", KERNELS)
def test_under_the_command(arms, case):
    assert arms.error(case, "run") < 1e-5
    assert arms.last_line == arms.expected_last_line()
