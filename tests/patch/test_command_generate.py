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


def test_a_quantised_cache(command, model_folder):
    """Its tokens are not those of `without`, but those of the same options without the patch."""
    quantised = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    arguments = ("mlx_lm.generate", "--model", model_folder, *ARGUMENTS, *quantised)
    off = command(*arguments)
    on = command("mlxlm-flash", "run", *arguments, flash="strict")
    assert on.returncode == 0, on.stderr
    assert on.stdout == off.stdout
    assert on.stderr.endswith("fallbacks: none\n")


@pytest.fixture
def falls_back(tmp_path):
    """A script that calls attention with a wide head_dim."""
    script = tmp_path / "falls_back.py"
    script.write_text(
        "import mlx.core as mx\n"
        "from mlx_lm.models.base import scaled_dot_product_attention\n"
        "x = mx.ones((1, 2, 5, 600))\n"
        "for _ in range(2):\n"
        "    out = scaled_dot_product_attention(x, x, x, None, 1.0, None)\n"
    )
    return script


def test_fallbacks_are_said(command, falls_back):
    done = command("mlxlm-flash", "run", falls_back)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].endswith("fallbacks: head_dim over 512 2")
    assert done.stderr.count("FlashFallbackWarning: ") == 1


def test_strict_refuses_them(command, falls_back):
    done = command("mlxlm-flash", "run", falls_back, flash="strict")
    assert done.returncode == 1
    assert "FlashFallbackError: " in done.stderr
    assert "head_dim over 512" in done.stderr


def test_off_with_the_prompt_from_stdin(command, model_folder, without):
    arguments = ("mlx_lm", "generate", "--model", model_folder, *["-" if "is" in a else a for a in ARGUMENTS])
    done = command("mlxlm-flash", "run", *arguments, input="Attention is", flash="0")
    assert done.stdout == without
    assert done.stderr == "[mlxlm-flash] flash attention off: MLXLM_FLASH=0\n"
