"""mlxlm-flash run mlx_lm.lora: mlx-lm's own trainer, with the same losses step by step."""

import json
import pydoc_data.topics
import re

import pytest

STEPS = 6


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of different lengths: the trainer pads its batches."""
    folder = tmp_path_factory.mktemp("texts")
    passages = [
        text[:length] for text, length in zip(pydoc_data.topics.topics.values(), range(200, 4000, 60), strict=False)
    ]
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    return folder


def train(command, model_folder, texts, tmp_path, flash, *more):
    done = command(
        "mlxlm-flash", "run", "mlx_lm.lora", "--model", model_folder, "--train", "--data", texts,
        "--iters", str(STEPS), "--batch-size", "2", "--num-layers", "2", "--max-seq-length", "300",
        "--val-batches", "1", "--steps-per-report", "1", "--learning-rate", "1e-3",
        "--adapter-path", tmp_path / f"adapters {flash}", *more,
        flash=flash,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # colours
    losses = [float(loss) for loss in re.findall(r"^ +\d+ +(\d+\.\d+)", lines, re.MULTILINE)]
    assert len(losses) == STEPS, done.stdout
    return losses, done.stderr


@pytest.mark.parametrize("more", [(), ("--grad-checkpoint",)], ids=["plain", "checkpointed"])
def test_the_same_losses(command, model_folder, texts, tmp_path, more):
    off, _ = train(command, model_folder, texts, tmp_path, "0", *more)
    on, said = train(command, model_folder, texts, tmp_path, "strict", *more)
    assert on == pytest.approx(off, abs=2e-3)  # printed with three digits
    assert off[-1] < off[0]
    backward = int(re.search(r"cpu_backward (\d+)", said)[1])
    assert backward == 2 * STEPS  # each of the two layers that are trained
    assert "fallbacks: none" in said
