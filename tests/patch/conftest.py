"""Fixtures of the patch's tests. They switch the patch off after each test, and make small random models."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import flashattn_core
import mlx.core as mx
import mlx_lm.models
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import _ext
from mlx_lm.models import base, cache, gear, gemma2, phi3small
from mlx_lm.utils import load
from mlxlm_flash_patch import patch, router
from mlxlm_flash_patch.mlx_own import mlx_attention
from mlxlm_flash_patch.patch_points import POINTS

from tests.patch.model_configs import ARCHITECTURES, config, random_model
from tests.patch.model_folders import write_model

# A tuple hides these functions from the patch, which would replace functions that are attributes of this module.
ORIGINALS = tuple((point, point.current) for point in POINTS)
HOMES = (base, cache, gear, gemma2, phi3small)  # imported, because they define all functions of mlx-lm in POINTS


def tiny_config(model_type="qwen2", **changes):
    """The configuration of a model of two layers. Heads have 32 elements, so that mlx-lm's caches can quantise them."""
    return {**config(model_type), "hidden_size": 128, "head_dim": 32, **changes}


@pytest.fixture(autouse=True)
def unpatched():
    """Unpatches MLX, mlx-lm and all models after every test."""
    yield
    for model in list(patch._patched_models.values()):
        flash.unpatch_model(model)
    patch._patched_modules.clear()
    flash.disable()
    patch._settle()
    assert type(mx.fast) is type(mx)
    assert [point.name for point, original in ORIGINALS if point.current is not original] == []


@pytest.fixture
def mlx_own():
    """MLX's own attention function, saved before any patch."""
    return mlx_attention


@pytest.fixture
def original():
    """mlx-lm's own attention function."""
    name = "mlx_lm.models.base.scaled_dot_product_attention"
    return next(original for point, original in ORIGINALS if point.name == name)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture
def kernels_take(monkeypatch):
    """kernels_take(head_dim, gradient): pretends that kernels take `head_dim` at most, and backward `gradient`."""

    def at_most(head_dim, gradient):
        monkeypatch.setattr(_ext, "quick", lambda *_: None)  # quick() would ignore the pretended max_head_dim()
        monkeypatch.setattr(flashattn_core, "max_head_dim", lambda **of: gradient if of["gradient"] else head_dim)
        router._max_head_dim.cache_clear()

    yield at_most
    router._max_head_dim.cache_clear()


@pytest.fixture
def tiny():
    """tiny(model_type, dtype, seed, **changes): a model of two layers with random weights."""
    return lambda model_type="qwen2", dtype=mx.float32, seed=0, **changes: random_model(
        model_type, tiny_config(model_type, **changes), dtype, seed
    )


@pytest.fixture
def tokens():
    """tokens(batch, length): random token ids. Equal arguments give equal ids."""
    return lambda batch=1, length=20: mx.random.randint(0, 97, (batch, length), key=mx.random.key(0))


@pytest.fixture
def late(monkeypatch):
    """late(name): imports a module of mlx_lm.models as if for the first time."""

    def fresh(name):
        monkeypatch.delitem(sys.modules, f"mlx_lm.models.{name}", raising=False)
        monkeypatch.setattr(mlx_lm.models, name, None, raising=False)  # `from . import name` reads this attribute
        return importlib.import_module(f"mlx_lm.models.{name}")

    return fresh


@pytest.fixture(scope="session")
def light(tmp_path_factory):
    """Environment variables with which mlx_lm has an empty __init__.py. Its models then import 20 times as fast."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "mlx_lm").mkdir()
    (folder / "mlx_lm" / "__init__.py").touch()
    for path in Path(mlx_lm.__file__).parent.iterdir():
        if path.name != "__init__.py":
            (folder / "mlx_lm" / path.name).symlink_to(path)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def command():
    """command(name, *arguments, flash=None): runs a command of this environment with MLXLM_FLASH set to `flash`."""

    def run(name, *arguments, flash=None, env=None, timeout=60, **options):
        env = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {}), "MLXLM_FLASH": flash}
        env = {name: value for name, value in env.items() if value is not None}
        path = Path(sys.executable).parent / name
        return subprocess.run([path, *arguments], env=env, capture_output=True, text=True, timeout=timeout, **options)

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A folder with a random Qwen2, whose tokens are the 256 bytes and an end-of-text token."""
    folder = tmp_path_factory.mktemp("tiny-qwen2")
    write_model(folder, tiny_config(vocab_size=257))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    return load(str(model_folder))[1]


@pytest.fixture(scope="session")
def chat_folder(model_folder, tmp_path_factory):
    """model_folder with a chat template that joins messages' contents."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("tiny-chat") / "model")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return folder
