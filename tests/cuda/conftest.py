"""Tests of the CUDA kernels on a GPU. Without MLX's CUDA build and a GPU they are skipped, and say so."""

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True, scope="session")
def _gpu():
    if not mx.cuda.is_available():
        pytest.skip("no NVIDIA GPU, or an MLX without CUDA: pip install 'flashattn-core[cuda12]'")
    mx.set_default_device(mx.gpu)
