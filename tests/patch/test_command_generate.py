"""mlxlm-flash run mlx_lm.generate prints mlx_lm.generate's greedy tokens, and two lines of its own on stderr."""

import re

import pytest
from mlxlm_flash_patch.blas import REFERENCE

PROMPT = ("--prompt", "Attention is")
ARGUMENTS = ("--ignore-chat-template", "--max-tokens", "24", "--verbose", "False")
QUANTISED = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
RAN = r"\[mlxlm-flash\] flash attention ran: (cpu_prefill \d+, )?cpu_decode \d+ · fallbacks: none"


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    ("program", "flash", "first", "last"),
    [
        (["mlx_lm.generate", *PROMPT], "1", r"\[mlxlm-flash\] flash attention on: mlx .* · mlx-lm .* · cpu .*", RAN),
        (["mlx_lm.generate", *PROMPT, *QUANTISED], "strict", r"\[mlxlm-flash\] flash attention on, strict: .*", RAN),
        (["mlx_lm", "generate", "--prompt", "-"], "0", r"\[mlxlm-flash\] flash attention off: MLXLM_FLASH=0", None),
    ],
    ids=["plain", "quantised", "off, from stdin"],
)
def test_the_same_text(command, model_folder, program, flash, first, last):
    arguments = (*program, "--model", model_folder, *ARGUMENTS)
    off = command(*arguments, input="Attention is")
    on = command("mlxlm-flash", "run", *arguments, input="Attention is", flash=flash)
    assert on.returncode == 0, on.stderr
    assert on.stdout == off.stdout != ""
    lines = [line for line in on.stderr.splitlines() if REFERENCE not in line]  # test_blas.py tests this line
    assert re.fullmatch(first, lines[0])
    assert re.fullmatch(last, lines[1]) if last else lines[1:] == []


@pytest.mark.slow("2 seconds")
def test_fallbacks(command, light, tmp_path):
    """The last line reports fallbacks; with strict, the first one is an error."""
    script = tmp_path / "falls_back.py"
    script.write_text(
        "import mlx.core as mx\n"
        "from mlx_lm.models.base import scaled_dot_product_attention\n"
        "x = mx.ones((1, 2, 5, 600))\n"
        "for _ in range(2):\n"
        "    out = scaled_dot_product_attention(x, x, x, None, 1.0, None)\n"
    )
    done = command("mlxlm-flash", "run", script, env=light)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].endswith("fallbacks: head_dim over 512 2")
    assert done.stderr.count("FlashFallbackWarning: ") == 1
    done = command("mlxlm-flash", "run", script, env=light, flash="strict")
    assert done.returncode == 1
    assert "FlashFallbackError: " in done.stderr
    assert "head_dim over 512" in done.stderr
