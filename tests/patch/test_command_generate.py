"""mlxlm-flash run mlx_lm.generate prints the same greedy text as mlx_lm.generate. It adds two lines to stderr."""

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
    lines = [line for line in on.stderr.splitlines() if REFERENCE not in line]  # test_blas.py tests that line
    assert re.fullmatch(first, lines[0])
    assert re.fullmatch(last, lines[1]) if last else lines[1:] == []
