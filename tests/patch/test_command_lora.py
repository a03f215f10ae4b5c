"""mlx_lm.lora prints the same losses and saves the same adapters with the patch as without it."""

import json
import pydoc_data.topics
import re

import mlx.core as mx
import pytest

from tests.promises import promise

STEPS = 6
PRINTED = 0.0011  # mlx_lm.lora prints losses with three decimals, and the last one may differ


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two data folders: one of plain texts, and one of prompts with completions.

    Lengths differ, so the trainer pads its batches.
    """
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
    """train(model, flash, *more): runs mlx_lm.lora. Returns the losses, the saved adapters, and the command's stderr.

    The optimizer is plain SGD. The adapters are then sums of gradients, so a wrong gradient changes them. Adam would
    divide by a gradient's size. Where a gradient is nearly zero, Adam would turn rounding errors into whole steps.
    """

    def run(model, flash, *more, data="texts"):
        adapters = tmp_path / f"adapters {flash}"
        done = command(
            "mlxlm-flash", "run", "mlx_lm.lora", "--model", model, "--train", "--data", texts / data,
            "--iters", str(STEPS), "--batch-size", "2", "--num-layers", "-1", "--max-seq-length", "300",
            "--val-batches", "1", "--steps-per-report", "1", "--adapter-path", adapters,
            "--optimizer", "sgd", "--learning-rate", "0.01", *more,
            flash=flash, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # removes colours
        losses = [float(loss) for loss in re.findall(r"^ +\d+ +(\d+\.\d+)", lines, re.MULTILINE)]
        assert len(losses) == STEPS, done.stdout
        return losses, mx.load(str(adapters / "adapters.safetensors")), done.stderr

    return run


@promise("mlx_lm.lora gives the same losses and adapters")
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
    off_losses, off, _ = train(chat_folder, "0", *more, data=data)
    on_losses, on, said = train(chat_folder, "strict", *more, data=data)
    assert on_losses == pytest.approx(off_losses, abs=PRINTED)
    assert len(set(off_losses)) > 1
    assert on.keys() == off.keys()
    for name, learned in off.items():
        assert mx.abs(on[name] - learned).max() <= 1e-4 * mx.abs(learned).max() + 1e-7, name
    assert re.search(rf"cpu_backward {2 * STEPS}\b.* fallbacks: none", said)  # the model has two layers
