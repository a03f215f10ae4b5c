"""Models are loaded, or an error says why they cannot be. Texts become tokens."""

import json
import re
import shutil

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from flash_evals.results.errors import EvalError
from flash_evals.work import models
from mlx_lm.utils import quantize_model, save


def test_describe(loaded, model_folder, make_model):
    described = loaded.described
    assert (described.name, described.type, described.dtype) == (model_folder.name, "qwen2", "float32")
    assert described.max_positions == 128
    weights = mx.load(str(model_folder / "model.safetensors"))
    assert described.parameters == sum(weight.size for weight in weights.values())
    assert models.load(str(make_model(dtype=mx.bfloat16))).described.dtype == "bfloat16"


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
        ("config.json", "{", "cannot load"),
        ("config.json", {"model_type": "abacus"}, "Model type abacus not supported"),
        ("config.json", {"hidden_size": 64}, "cannot load .*shape"),
        ("model.safetensors", None, "No safetensors found"),
        ("tokenizer.json", None, "the folder has no tokenizer"),
    ],
)
def test_a_folder_that_cannot_be_loaded(file, content, says, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    if isinstance(content, dict):  # settings to change in the file
        content = json.dumps({**json.loads((folder / file).read_text()), **content})
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
