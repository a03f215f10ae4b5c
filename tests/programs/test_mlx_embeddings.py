"""mlx-embeddings: texts of different lengths in one batch have the same vectors with flash attention."""

import pytest

pytestmark = pytest.mark.nightly("installs mlx-embeddings")

KERNELS = {
    "modernbert_in_float32": {"cpu_prefill": 3},
    "qwen3_embedding": {"cpu_prefill": 2},
    "bert_writes_attention_out": {},
}


@pytest.fixture(scope="module")
def arms(arms_of):
    return arms_of("mlx_embeddings_models", "mlx-embeddings==0.1.0")


@pytest.mark.parametrize("case", KERNELS)
def test_the_same_results(arms, case):
    """The largest difference seen was 7e-7."""
    arms.check(case, KERNELS[case])


def test_padding_in_float16_is_cured(arms):
    """In stock MLX, padded queries that see no key in their window give NaN. The next layer spreads the NaN."""
    case = "modernbert_in_float16"
    assert arms.not_finite(case, "off") > 0
    assert arms.not_finite(case, "on") == arms.not_finite(case, "run") == 0
    assert arms.kernels(case) == {"cpu_prefill": 3}
