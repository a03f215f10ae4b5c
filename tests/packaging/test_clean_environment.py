"""The op and every command work with the wheels alone, away from the repository."""

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.promises import promise

pytestmark = pytest.mark.nightly("installs the three wheels")
FORWARD = """
import numpy as np, mlx.core as mx, flashattn_core
from flashattn_core.masks import SlidingWindow
from flashattn_core.reference import reference_attention
query = np.random.default_rng(0).normal(size=(2, 6, 70, 64)).astype(np.float32)
key, value = np.random.default_rng(1).normal(size=(2, 2, 2, 130, 64)).astype(np.float32)
out = flashattn_core.flash_attention(*map(mx.array, (query, key, value)), mask=SlidingWindow(50))
print(np.abs(np.array(out) - reference_attention(query, key, value, mask=SlidingWindow(50))[0]).max())
import mlxlm_flash_patch, flash_evals, sys
print(*(module.__file__ for name, module in sys.modules.items() if "flash" in name), sep="\\n")
"""
GENERATE = ("--prompt", "The class statement", "--ignore-chat-template", "--max-tokens", "12", "--temp", "0")


def generate(environment, *command):
    """Runs mlx_lm.generate with the shipped model. Returns the generated text, and stderr."""
    model = environment.check("flash-eval", "demo-model").strip()
    done = environment.run(*command, "--model", model, *GENERATE)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("==========")[1], done.stderr


def test_the_op_against_the_reference(environment):
    """The op's result equals the reference's. All modules of the three packages come from the environment."""
    error, *files = environment.check("python", "-c", FORWARD).splitlines()
    assert float(error) < 1e-5
    assert files
    assert [file for file in files if environment.site_packages not in Path(file).parents] == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("mlxlm-flash status", f"flashattn-core {version('flashattn-core')}"),
        # doctor checks versions, and runs a prefill and a decode step. It exits with 1 if anything is broken.
        ("mlxlm-flash doctor", "uses the same nanobind ABI as MLX"),
        ("flash-eval perplexity --max-windows 4", "Same predictions"),
    ],
)
def test_commands(environment, command, says):
    assert says in environment.check(*command.split())


@promise("the wheels alone work in an empty environment")
def test_run(environment):
    plain, _ = generate(environment, "mlx_lm.generate")
    text, said = generate(environment, "mlxlm-flash", "run", "mlx_lm.generate")
    assert text == plain
    assert "flash attention ran: " in said
    assert "cpu_decode" in said
    assert "fallbacks: none" in said
