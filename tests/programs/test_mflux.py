"""mflux: transformers and decoders for images give the same results with flash attention.

On Linux, mflux 0.24 requires PyTorch and another version of MLX, but its modules can be imported without these two. So
the test installs mflux without its requirements.
"""

import pytest

pytestmark = pytest.mark.nightly("installs mflux")

KERNELS = {
    "z_image": {"cpu_prefill": 1 + 1 + 2},
    "flux2": {"cpu_prefill": 2 + 2},
    "flux2_vae": {"cpu_prefill": 1},
    "vae_attention": {"cpu_prefill": 1},
}
NEEDED = (
    "filelock",
    "huggingface-hub",
    "numpy",
    "piexif",
    "pillow",
    "platformdirs",
    "regex",
    "safetensors",
    "toml",
    "tqdm",
)
NEEDED += ("transformers",)


@pytest.fixture(scope="module")
def arms(arms_of):
    return arms_of("mflux_models", *NEEDED, alone="mflux==0.24.0")


@pytest.mark.parametrize("case", KERNELS)
def test_the_same_results(arms, case):
    """The largest difference seen was 2e-6."""
    arms.check(case, KERNELS[case])


def test_a_decoder_takes_less_memory(arms):
    """The scores of 48 x 48 positions in one head take 21 MB."""
    off, on = arms.memory("vae_attention")
    assert off - on > 0.95 * (48 * 48) ** 2 * 4 / 1e6
