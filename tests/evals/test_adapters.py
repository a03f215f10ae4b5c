"""--adapter-path adds the adapters that mlx_lm.lora has trained, or is refused."""

import json
import shutil

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from flash_evals.results.errors import EvalError
from flash_evals.work import models
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

PARAMETERS = {"rank": 4, "scale": 20.0, "dropout": 0.5}
LAYERS = 1


@pytest.fixture
def make_adapters(tmp_path):
    """make_adapters(model_folder, kind): a folder like mlx_lm.lora's, with random adapters for that model."""

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
    """The logits are mlx-lm's, so there is no dropout. Every command that does not train the model takes adapters."""
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


OF_ANOTHER_MODEL = "does not match model parameter shape"
NONE = "adapters.safetensors holds no adapters"
SPOIL = {
    "The adapter path does not exist": shutil.rmtree,
    "No such file .*adapter_config.json": lambda folder: (folder / "adapter_config.json").unlink(),
    "Failed to open file .*adapters.safetensors": lambda folder: (folder / "adapters.safetensors").unlink(),
    "Unable to read": lambda folder: (folder / "adapters.safetensors").write_bytes(b"nothing"),
    "num_layers": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "incompatible tensors: .*shape": lambda folder: change(folder, lora_parameters={**PARAMETERS, "rank": 8}),
    "the file lacks 14 of 28 tensors, and has 14": lambda folder: change(folder, num_layers=2),
    "the file lacks 7 of 14 tensors, and has 7": lambda folder: leave_out(folder, "lora_b"),
    NONE: lambda folder: leave_out(folder, ""),
    OF_ANOTHER_MODEL: lambda folder: None,
}


@pytest.mark.parametrize("says", SPOIL)
def test_adapters_that_cannot_be_loaded(says, make_adapters, make_model, model_folder):
    model = make_model(hidden_size=64) if says == OF_ANOTHER_MODEL else model_folder
    folder = make_adapters(model, "full" if says == NONE else "lora")
    SPOIL[says](folder)
    with pytest.raises(EvalError, match=f"cannot load the adapters in {folder}: .*{says}") as refusal:
        models.load(str(model_folder), adapter_path=str(folder))
    assert "\n" not in refusal.value.message
