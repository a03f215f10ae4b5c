"""What the tests of the patch share: it is off before and after each test, and small random models to try it on."""

import contextlib
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import flashattn_core
import mlx.core as mx
import mlx_lm.models
import mlxlm_flash_patch as flash
import pytest
import tokenizers
from mlx_lm.models import base
from mlxlm_flash_patch import obstacles, patch
from mlxlm_flash_patch.places import places
from model_configs import ARCHITECTURES, config, random_model

ORIGINAL = base.scaled_dot_product_attention


def tiny_config(model_type="qwen2", **changes):
    """Two layers with heads of 32 elements, which a cache can quantise."""
    return {**config(model_type), "hidden_size": 128, "head_dim": 32, **changes}


@pytest.fixture(autouse=True)
def unpatched():
    """Every test starts and ends with mlx-lm as it was, and without models that another test has left."""
    yield
    patch.dismiss(list(patch._patched_modules.values()))
    flash.disable()
    for place in places():
        if place.module.startswith("mlx_lm.models."):
            assert place.is_original(place.held), place.name


@pytest.fixture
def original():
    """mlx-lm's own function."""
    return ORIGINAL


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture
def kernels_take(monkeypatch):
    """kernels_take(head_dim, gradient): the core's table has no more, for a call and for its gradient."""

    def at_most(head_dim, gradient):
        monkeypatch.setattr(flashattn_core, "max_head_dim", lambda **of: gradient if of["gradient"] else head_dim)
        obstacles._max_head_dim.cache_clear()

    yield at_most
    obstacles._max_head_dim.cache_clear()


@pytest.fixture
def too_wide(kernels_take):
    """Makes every call fall back; this is the reason."""
    kernels_take(1, gradient=1)
    return "head_dim over 1"


@pytest.fixture
def tiny():
    """tiny(model_type, dtype, seed, **changes): a model of two layers with random weights."""
    return lambda model_type="qwen2", dtype=mx.float32, seed=0, **changes: random_model(
        model_type, tiny_config(model_type, **changes), dtype, seed
    )


@pytest.fixture
def tokens():
    """tokens(batch, length, seed): random token ids."""
    return lambda batch=1, length=20, seed=0: mx.random.randint(0, 97, (batch, length), key=mx.random.key(seed))


@pytest.fixture
def late(monkeypatch):
    """late(name): imports a module of mlx_lm.models as if for the first time."""

    def fresh(name):
        monkeypatch.delitem(sys.modules, f"mlx_lm.models.{name}", raising=False)
        monkeypatch.setattr(mlx_lm.models, name, None, raising=False)  # where `from . import name` would look
        return importlib.import_module(f"mlx_lm.models.{name}")

    return fresh


@pytest.fixture(scope="session")
def light(tmp_path_factory):
    """An environment in which `import mlx_lm` imports nothing: its models start 20 times as fast without the rest."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "mlx_lm").mkdir()
    (folder / "mlx_lm" / "__init__.py").touch()
    for path in Path(mlx_lm.__file__).parent.iterdir():
        if path.name != "__init__.py":
            (folder / "mlx_lm" / path.name).symlink_to(path)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def command():
    """command(name, *arguments, flash="1"): runs a command of this environment in a process of its own."""

    def run(name, *arguments, flash=None, env=None, timeout=60, **options):
        env = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {}), "MLXLM_FLASH": flash}
        env = {name: value for name, value in env.items() if value is not None}
        path = Path(sys.executable).parent / name
        return subprocess.run([path, *arguments], env=env, capture_output=True, text=True, timeout=timeout, **options)

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random Qwen2 in mlx-lm's layout: configuration, weights, and a tokenizer whose tokens are the bytes."""
    folder = tmp_path_factory.mktemp("tiny-qwen2")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))

    (folder / "config.json").write_text(json.dumps(tiny_config(vocab_size=len(vocabulary))))
    model = random_model("qwen2", tiny_config(vocab_size=len(vocabulary)))
    model.save_weights(str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="session")
def chat_folder(model_folder, tmp_path_factory):
    """The same with a chat template: what is said, one after the other."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("tiny-chat") / "model")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def served(chat_folder):
    """served(command, env): a context in which that mlx_lm.server runs; ask(prompt) for 8 tokens, and the process."""

    @contextlib.contextmanager
    def serve(command, env):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        address = f"http://127.0.0.1:{port}"

        def ask(prompt):
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["text"]

        arguments = [*command, "--model", chat_folder, "--port", port]
        with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                for _ in range(1200):  # two minutes: the machine may be busy
                    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=60):
                        break
                    assert process.poll() is None, process.stderr.read()
                    time.sleep(0.1)
                yield ask, process
            finally:
                process.kill()

    return serve
