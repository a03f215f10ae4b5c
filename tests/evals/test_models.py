"""Models and adapters are loaded, or an error says why they cannot be. Texts become tokens."""

import json
import re
import shutil
from dataclasses import replace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from flash_evals.results.errors import EvalError
from flash_evals.work import models
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import quantize_model, save


def test_describe(loaded, model_folder, make_model):
    described = loaded.described
    assert (described.name, described.type, described.dtype) == (model_folder.name, "qwen2", "float32")
    assert described.max_positions == 128
    weights = mx.load(str(model_folder / "model.safetensors"))
    assert described.parameters == sum(weight.size for weight in weights.values())
    assert models.load(str(make_model(dtype=mx.bfloat16))).described.dtype == "bfloat16"


def test_the_number_of_heads_has_several_names(loaded):
    for name in ("num_attention_heads", "n_heads", "n_head", "num_heads"):
        assert replace(loaded, config={name: 12, "hidden_size": 768}).head_dim == 64
    with pytest.raises(EvalError, match=r"config\.json of .* lacks the number of attention heads"):
        replace(loaded, config={"hidden_size": 768}).head_dim  # noqa: B018


@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize(("mode", "bits"), [("affine", 4), ("affine", 8), ("mxfp4", 4)])
def test_a_quantised_model(mode, bits, loaded, model_folder, tmp_path, run_command):
    """Quantising with mlx-lm changes the predictions of both arms equally. The page names the number of bits."""
    network, tokenizer, config = mlx_lm.load(str(model_folder), return_config=True)
    network, config = quantize_model(network, config, group_size=32, bits=bits, mode=mode)
    save(tmp_path / "quantised", model_folder, network, tokenizer, config)
    result, whole = (run_command("perplexity", "--model", folder) for folder in (tmp_path / "quantised", model_folder))
    assert result["model"]["parameters"] == loaded.described.parameters
    assert result["off"]["ppl"] != whole["off"]["ppl"]
    assert result["on"]["ppl"] == pytest.approx(result["off"]["ppl"], rel=1e-5)
    title = rf"quantised, [\d.]+ k parameters, {bits}-bit, float32 · "
    assert re.match(title, result["page"])


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "No such file .*config.json"),
        ("config.json", "{", "cannot load"),
        ("config.json", "{}", "cannot load .*model_type"),
        ("model.safetensors", "nothing", "cannot load"),
        ("tokenizer.json", None, "the folder has no tokenizer"),
    ],
)
def test_a_folder_that_cannot_be_loaded(file, content, says, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(EvalError, match=says) as refusal:
        models.load(str(folder))
    assert "\n" not in refusal.value.message


def test_tokens_and_the_text_up_to_them(loaded, make_model, text):
    """text_up_to(n) is the text of the tokens 0 to n. A BOS that the tokenizer adds comes first, and has no text."""
    tokens = models.encode(loaded, text, "auto")
    assert not tokens.bos
    for token in range(len(tokens.ids)):
        prefix = tokens.text_up_to(token)
        assert text.startswith(prefix)
        decoded = loaded.tokenizer.decode(tokens.ids[: token + 1].tolist())
        # If the bytes of a character are in several tokens, the character belongs to the first of them.
        assert prefix == decoded or decoded.rstrip("\ufffd") == prefix[:-1]
    assert prefix == text
    with_bos = models.load(str(make_model(bos=True)))
    behind = models.encode(with_bos, text, "auto")
    assert (behind.bos, behind.ids[0]) == ("bos", with_bos.tokenizer.bos_token_id)
    np.testing.assert_array_equal(behind.ids[1:], models.encode(with_bos, text, "never").ids)
    assert (behind.text_up_to(0), behind.text_up_to(5)) == ("", tokens.text_up_to(4))


def test_tokens_that_the_model_does_not_have(make_model):
    loaded = models.load(str(make_model(vocab_size=100)))
    with pytest.raises(EvalError, match=r"makes token \d+, but the vocab_size of .* is 100"):
        models.encode(loaded, "Naïve readers", "auto")


PARAMETERS = {"rank": 4, "scale": 20.0, "dropout": 0.5}
LAYERS = 1


@pytest.fixture
def make_adapters(tmp_path):
    """make_adapters(model_folder, kind): writes random adapters into a folder, in the format of mlx_lm.lora."""

    def make(model_folder, kind="lora"):
        folder = tmp_path / f"my-{kind}"
        folder.mkdir()
        network, _ = mlx_lm.load(str(model_folder))
        network.freeze()
        if kind == "full":
            network.layers[-1].unfreeze()
        else:
            linear_to_lora_layers(network, LAYERS, PARAMETERS, use_dora=kind == "dora")
        random = np.random.default_rng(0)
        learned = {
            name: value + mx.array(random.normal(scale=0.02, size=value.shape), dtype=value.dtype)
            for name, value in tree_flatten(network.trainable_parameters())
        }
        mx.save_safetensors(str(folder / "adapters.safetensors"), learned)
        config = {"fine_tune_type": kind, "num_layers": LAYERS, "lora_parameters": PARAMETERS}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_adapters_are_those_of_mlx_lm(kind, make_adapters, model_folder, run_command):
    """Logits with adapters equal mlx-lm's, without dropout. The commands perplexity and speed take adapters."""
    adapters = make_adapters(model_folder, kind)
    plain, adapted = models.load(str(model_folder)), models.load(str(model_folder), adapter_path=str(adapters))
    expected, _ = mlx_lm.load(str(model_folder), adapter_path=str(adapters))
    without, ours, theirs = (np.array(each(mx.arange(16)[None])) for each in (plain.model, adapted.model, expected))
    np.testing.assert_array_equal(ours, theirs)
    assert np.abs(ours - without).max() > 1e-3
    described = adapted.described
    assert described.parameters == plain.described.parameters
    assert (described.adapter_path, described.adapter_type) == (str(adapters), kind)
    for command in (["perplexity", "--max-windows", 2], ["speed", "-p", 8, "-g", 0, "-d", 0, "-r", 1]):
        page = run_command(*command, "--adapter-path", adapters)["page"]
        assert page.startswith(f"{model_folder.name}, {kind} adapters my-{kind}, ")


def change(folder, **settings):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def leave_out(folder, end):
    """Removes all tensors whose name ends with `end`."""
    file = str(folder / "adapters.safetensors")
    mx.save_safetensors(file, {name: value for name, value in mx.load(file).items() if not name.endswith(end)})


NONE = "adapters.safetensors holds no adapters"
SPOIL = {
    "The adapter path does not exist": shutil.rmtree,
    "Unable to read": lambda folder: (folder / "adapters.safetensors").write_bytes(b"nothing"),
    "num_layers": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "incompatible tensors: .*shape": lambda folder: change(folder, lora_parameters={**PARAMETERS, "rank": 8}),
    "the file lacks 14 of 28 tensors, and has 14": lambda folder: change(folder, num_layers=2),
    "the file lacks 7 of 14 tensors, and has 7": lambda folder: leave_out(folder, "lora_b"),
    NONE: lambda folder: leave_out(folder, ""),
}


@pytest.mark.parametrize("says", SPOIL)
def test_adapters_that_cannot_be_loaded(says, make_adapters, model_folder):
    folder = make_adapters(model_folder, "full" if says == NONE else "lora")
    SPOIL[says](folder)
    with pytest.raises(EvalError, match=f"cannot load the adapters in {folder}: .*{says}") as refusal:
        models.load(str(model_folder), adapter_path=str(folder))
    assert "\n" not in refusal.value.message
