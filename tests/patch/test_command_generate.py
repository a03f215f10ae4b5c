"""mlxlm-flash run mlx_lm.generate: the same greedy tokens as without it, and two lines on stderr that say how."""

import re

import pytest
from mlx_lm.utils import load

ARGUMENTS = ("--prompt", "Attention is", "--ignore-chat-template", "--max-tokens", "24", "--verbose", "False")


@pytest.fixture(scope="module")
def without(model_folder):
    """What the unmodified program prints."""
    model, tokenizer = load(str(model_folder))
    from mlx_lm.generate import generate

    return generate(model, tokenizer, "Attention is", max_tokens=24) + "\n"


def test_the_same_text(command, model_folder, without):
    done = command("mlxlm-flash", "run", "mlx_lm.generate", "--model", model_folder, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == without
    first, last = done.stderr.splitlines()
    assert re.fullmatch(r"\[mlxlm-flash\] flash attention on: mlx .* · mlx-lm .* · cpu .*", first)
    assert re.fullmatch(r"\[mlxlm-flash\] flash attention ran: cpu_prefill \d+, cpu_decode \d+ · fallbacks: none", last)


def test_fallbacks_are_said(command, model_folder):
    quantised = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    done = command("mlxlm-flash", "run", "mlx_lm.generate", "--model", model_folder, *ARGUMENTS, *quantised)
    assert done.returncode == 0
    assert "fallbacks: quantised KV cache " in done.stderr.splitlines()[-1]
    assert done.stderr.count("FlashFallbackWarning: ") == 1


def test_strict_refuses_them(command, model_folder):
    quantised = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    arguments = ("mlx_lm.generate", "--model", model_folder, *ARGUMENTS, *quantised)
    done = command("mlxlm-flash", "run", *arguments, flash="strict")
    assert done.returncode == 1
    assert "FlashFallbackError: " in done.stderr
    assert "quantised KV cache" in done.stderr


def test_off_with_the_prompt_from_stdin(command, model_folder, without):
    arguments = ("mlx_lm", "generate", "--model", model_folder, *["-" if "is" in a else a for a in ARGUMENTS])
    done = command("mlxlm-flash", "run", *arguments, input="Attention is", flash="0")
    assert done.stdout == without
    assert done.stderr == "[mlxlm-flash] flash attention off: MLXLM_FLASH=0\n"
