"""Under mlxlm-flash run, mlx_lm.lora prints the same losses and saves the same adapters."""

import json
import pydoc_data.topics
import re
import shutil

import mlx.core as mx
import pytest
from flash_evals.work.models import DEMO_MODEL

from tests.patch.model_configs import random_model

STEPS = 6
PRINTED = 0.0011  # losses are printed with three decimals, of which the last may round either way


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Folders with plain texts and with prompts and completions. Lengths differ, so the trainer pads its batches."""
    folder = tmp_path_factory.mktemp("texts")
    topics = (text for text in pydoc_data.topics.topics.values() if len(text) > 400)
    passages = [text[:length] for text, length in zip(topics, range(40, 401, 24), strict=False)]
    completions = [{"prompt": text[:20], "completion": text[20:]} for text in passages]
    for form, rows in {"texts": [{"text": text} for text in passages], "completions": completions}.items():
        (folder / form).mkdir()
        for name in ("train", "valid"):
            (folder / form / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def train(command, texts, tmp_path):
    """train(model, flash, *more): the losses, the saved adapters, and the command's stderr."""

    def run(model, flash, *more, data="texts", steps=STEPS):
        adapters = tmp_path / f"adapters {flash}"
        done = command(
            "mlxlm-flash", "run", "mlx_lm.lora", "--model", model, "--train", "--data", texts / data,
            "--iters", str(steps), "--batch-size", "2", "--num-layers", "-1", "--max-seq-length", "300",
            "--val-batches", "1", "--steps-per-report", "1", "--learning-rate", "1e-3",
            "--adapter-path", adapters, *more,
            flash=flash, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # no colours
        losses = [float(loss) for loss in re.findall(r"^ +\d+ +(\d+\.\d+)", lines, re.MULTILINE)]
        assert len(losses) == steps, done.stdout
        return losses, mx.load(str(adapters / "adapters.safetensors")), done.stderr

    return run


def assert_ran(said, backward_calls):
    assert int(re.search(r"cpu_backward (\d+)", said)[1]) == backward_calls
    assert "fallbacks: none" in said


# With plain gradient descent, adapters are sums of gradients, so a wrong gradient shows in them. Adam divides by a
# gradient's size: where a gradient is nearly zero, rounding errors would become as large as the steps.
SGD = ("--optimizer", "sgd", "--learning-rate", "0.01")


@pytest.mark.slow("trains in two processes")
@pytest.mark.rotate(6)
@pytest.mark.parametrize(
    ("data", "more"),
    [
        ("texts", ()),
        ("texts", ("--grad-checkpoint",)),
        ("texts", ("--grad-accumulation-steps", "3")),
        ("texts", ("--fine-tune-type", "dora")),
        ("texts", ("--fine-tune-type", "full")),
        ("completions", ("--mask-prompt",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_same_training(train, chat_folder, data, more):
    off_losses, off, _ = train(chat_folder, "0", *SGD, *more, data=data)
    on_losses, on, said = train(chat_folder, "strict", *SGD, *more, data=data)
    assert on_losses == pytest.approx(off_losses, abs=PRINTED)
    assert len(set(off_losses)) > 1
    assert on.keys() == off.keys()
    for name, learned in off.items():
        assert mx.abs(on[name] - learned).max() <= 1e-4 * mx.abs(learned).max() + 1e-7, name
    assert_ran(said, 2 * STEPS)  # the model has two layers


@pytest.mark.nightly("minutes of training; test_patched_gradients.py trains smaller models")
@pytest.mark.rotate(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dimensions_of_qwen2_half_billion(train, dtype, tmp_path):
    """A random Qwen2 with Qwen2-0.5B's dimensions, but two layers and the shipped model's vocabulary.

    With a bfloat16 model, mlx-lm rounds each token's loss to bfloat16. Between 8 and 16 such numbers are 2^-4 apart, so
    rounding may change each loss, and their mean, by 2^-5.
    """
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {
        "hidden_size": 896, "num_hidden_layers": 2, "intermediate_size": 4864, "num_attention_heads": 14,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_theta": 1e6, "torch_dtype": dtype,
    }  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    random_model("qwen2", config, getattr(mx, dtype)).save_weights(str(tmp_path / "model.safetensors"))

    short = ("--batch-size", "1", "--max-seq-length", "70")  # these dimensions are slow on MLX's reference BLAS
    off, _, _ = train(tmp_path, "0", *SGD, *short, steps=3)
    on, _, said = train(tmp_path, "strict", *SGD, *short, steps=3)
    assert on == pytest.approx(off, abs=PRINTED if dtype == "float32" else 2**-5)
    assert_ran(said, 2 * 3)
