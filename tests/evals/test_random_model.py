"""write_random_model.py knows the shapes of published models, and writes folders that flash-eval reads."""

import runpy
from pathlib import Path

import click.testing
import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "packages/evals/scripts/write_random_model.py"))
PARAMETERS = {
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "qwen2.5-0.5b": 494_032_768,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 1024}
SMALL |= {"num_attention_heads": 8, "head_dim": 8, "sliding_window_pattern": 2}


@pytest.mark.parametrize("shape", SCRIPT["SHAPES"])
def test_as_many_parameters_as_published(shape):
    assert sum(array.size for array in SCRIPT["parameters"](SCRIPT["SHAPES"][shape]).values()) == PARAMETERS[shape]


@pytest.mark.slow("12 seconds")
@pytest.mark.parametrize("shape", SCRIPT["SHAPES"])
def test_the_patch_takes_all_of_it(shape, run_command, tmp_path):
    small = [f"{name}={number}" for name, number in SMALL.items() if name in SCRIPT["SHAPES"][shape]]
    written = click.testing.CliRunner().invoke(SCRIPT["main"], [shape, str(tmp_path), *small, "--dtype", "float32"])
    assert written.exit_code == 0, written.output
    flash = run_command("speed", "--model", tmp_path, "-p", 16, "-g", 2, "-d", 0, "-b", "1,2", "-r", 1)["flash"]
    assert flash["calls"]
    assert not flash["fallbacks"]
