"""mlx-audio: speech recognition gives the same results with flash attention."""

import pytest

from tests.programs.environments import SCRIPTS, kernels_of

pytestmark = pytest.mark.nightly("installs mlx-audio")

PROGRAM = "mlx-audio==0.6.2"

KERNELS = {
    "qwen3_asr": {"cpu_prefill": 2 + 2, "cpu_decode": 3 * 2},
    "whisper_writes_attention_out": {},
}


@pytest.fixture(scope="module")
def arms(arms_of):
    return arms_of("mlx_audio_models", PROGRAM)


@pytest.mark.parametrize("case", KERNELS)
def test_the_same_results(arms, case):
    """The largest difference seen was 7e-7."""
    arms.check(case, KERNELS[case])


def test_its_command(environment_of, tmp_path):
    """mlx_audio.stt.generate writes the same text."""
    environment = environment_of(PROGRAM)
    environment.check("python", SCRIPTS / "write_mlx_audio_model.py", tmp_path)
    options = ("--model", tmp_path, "--audio", tmp_path / "noise.wav", "--max-tokens", 8)
    generate = ("mlx_audio.stt.generate", *options, "--output-path")
    environment.check(*generate, tmp_path / "off")
    on = environment.check("mlxlm-flash", "run", *generate, tmp_path / "on")
    assert kernels_of(on) == {"cpu_prefill": 2 + 1, "cpu_decode": 9 * 2}
    assert (tmp_path / "on.txt").read_text() == (tmp_path / "off.txt").read_text() != ""
