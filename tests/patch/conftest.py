"""What the tests of the patch share: it is off before and after each test, and small random models to try it on."""

import contextlib
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
import mlxlm_flash_patch as flash
import pytest
import tokenizers
from mlx_lm.models import base
from mlxlm_flash_patch import obstacles, patch
from mlxlm_flash_patch.places import places
from model_configs import random_model

ORIGINAL = base.scaled_dot_product_attention

SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# What an architecture has that Qwen2 has not, which is why it is here.
OWN = {
    "qwen2": {},
    "llama": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "qwen3": {"tie_word_embeddings": False},  # and normalised queries and keys
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},  # and sinks
}


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


@pytest.fixture(params=OWN)
def architecture(request):
    """The model types that are tried with weights."""
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
def make_model():
    """make_model(model_type, config, dtype, seed): a model with random weights."""
    return random_model


@pytest.fixture
def tiny():
    """tiny(model_type, dtype, seed, **config): a model of two layers with grouped-query attention, random weights."""

    def make(model_type="qwen2", dtype=mx.float32, seed=0, **config):
        return random_model(model_type, {"model_type": model_type, **SIZES, **OWN[model_type], **config}, dtype, seed)

    return make


@pytest.fixture
def tokens():
    """tokens(batch, length): random token ids."""

    def make(batch=1, length=20, seed=0):
        return mx.random.randint(0, SIZES["vocab_size"], (batch, length), key=mx.random.key(seed))

    return make


@pytest.fixture
def command():
    """command(name, *arguments, flash="1"): runs a command of this environment in a process of its own."""

    def run(name, *arguments, flash=None, timeout=60, **options):
        env = {key: value for key, value in os.environ.items() if key != "MLXLM_FLASH"}
        env.update({"HF_HUB_OFFLINE": "1"} if flash is None else {"HF_HUB_OFFLINE": "1", "MLXLM_FLASH": flash})
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

    config = {"model_type": "qwen2", **SIZES, "vocab_size": len(vocabulary)}
    (folder / "config.json").write_text(json.dumps(config))
    model = random_model("qwen2", config)
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
                return json.load(answer)

        arguments = [*command, "--model", chat_folder, "--port", port]
        with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                for _ in range(600):
                    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=60):
                        break
                    assert process.poll() is None, process.stderr.read()
                    time.sleep(0.1)
                yield ask, process
            finally:
                process.kill()

    return serve
