"""mlx-lm gives the same logits with flash attention, also in versions that this project does not install."""

import pytest

from tests.promises import promise

pytestmark = pytest.mark.nightly("installs mlx-lm three times")

LAYERS, STEPS = 2, 4
KERNELS = {"cpu_prefill": LAYERS, "cpu_decode": LAYERS * STEPS}
# With a quantised cache, a tiny error in one layer can round a key of the next layer to another 8-bit number.
TOLERANCE = {"llama": 1e-5, "gemma2": 1e-5, "gpt_oss": 1e-5, "llama_with_a_quantised_cache": 5e-3}


@pytest.fixture(scope="module", params=["0.31.3", "0.32.0", "0.32.2"])
def arms(request, arms_of):
    return arms_of("mlx_lm_models", f"mlx-lm=={request.param}")


@promise("other versions of mlx-lm give the same logits")
@pytest.mark.parametrize("case", TOLERANCE)
def test_the_same_logits(arms, case):
    """The largest difference seen was 8e-7."""
    arms.check(case, KERNELS, tolerance=TOLERANCE[case])
