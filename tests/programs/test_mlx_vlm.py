"""mlx-vlm: vision models give the same results with flash attention."""

import pytest

from tests.packaging.build_wheels import ROOT
from tests.promises import promise

pytestmark = pytest.mark.nightly("installs mlx-vlm")

PROGRAM = "mlx-vlm==0.7.10"

# How often each kernel runs: once per layer of the language model, and once per image and layer of the vision tower.
# mlx-vlm's generate_step() first reads the prompt without its last token, and evaluates only the caches. So MLX skips
# attention in the last layer.
KERNELS = {
    "qwen2_vl": {"cpu_prefill": 2 * 2 + 2},  # two images
    "qwen2_vl_generates": {"cpu_prefill": 2 + 1, "cpu_decode": 13 * 2},
    "vision_tower": {"cpu_prefill": 1},
    "gemma3": {"cpu_prefill": 2 + 6},
}


@pytest.fixture(scope="module")
def arms(arms_of):
    return arms_of("mlx_vlm_models", PROGRAM)


@promise("other programs give the same results")
@pytest.mark.parametrize("case", KERNELS)
def test_the_same_results(arms, case):
    """The largest difference seen was 8e-6, for gemma3."""
    arms.check(case, KERNELS[case], tolerance=2e-5)


def test_the_example(environment_of):
    """Flash attention runs in two layers of the vision tower and in two of the language model."""
    printed = environment_of(PROGRAM).check("python", ROOT / "examples/vision_model.py").stdout
    assert "calls: cpu_prefill 4 · fallbacks: none" in printed
