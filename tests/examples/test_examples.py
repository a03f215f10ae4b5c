"""Each example runs on its own, and prints the expected lines."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"

RAN = r"\w*decode \d+, \w*prefill \d+ · fallbacks: none"
# Regular expressions that each example's output must match, for example to show that flash attention ran.
PRINTED = {
    "generate.py": [r"the same text without flash attention: True", rf"calls: {RAN}"],
    "batch.py": [r"the same texts without flash attention: True", rf"calls: {RAN}"],
    "server.py": [r"flash attention on: mlx", rf"flash attention ran: {RAN}"],
    "lora_long_context.py": [r"(step 0: loss [\d.]+).*\n(?:.*\n){2}.*\1"],
    "plot_lengths.py": [r"off, 2,048 tokens: .* MB", r"on, 2,048 tokens: .* MB", r"wrote .*\.png"],
    "vision_model.py": [
        r"largest difference of two logits: \d\.\de-0[5-9]"
        if find_spec("mlx_vlm")
        else r"^skipped: this example needs mlx-vlm \(pip install mlx-vlm\)$"
    ],
    "window_and_sinks.py": [r"sees only padding gives 0\.0", r"would take 1,074 MB"],
}


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.py")))
def test_runs(name, tmp_path):
    command = [sys.executable, FOLDER / name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for expected in PRINTED[name]:
        assert re.search(expected, done.stdout, re.M), f"{expected}\n{done.stdout}"
    if name == "plot_lengths.py":
        assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
