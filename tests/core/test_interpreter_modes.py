"""The import and a call in each of Python's modes: isolated, without assertions and docstrings, with all warnings."""

import subprocess
import sys

import pytest

CODE = """
import mlx.core as mx, flashattn_core
x = mx.ones((1, 2, 3, 8))
print((flashattn_core.flash_attention(x, x, x, mask=flashattn_core.masks.Causal()) == 1).all().item())
try:
    flashattn_core.flash_attention(x, x, x[..., :2, :])
except ValueError as error:
    print("refused")
"""


@pytest.mark.parametrize(
    "flags", [["-I"], ["-O"], ["-OO"], ["-X", "dev"], ["-W", "error", "-bb"], ["-B", "-P"]], ids=str
)
def test_import_and_call(flags):
    done = subprocess.run(
        [sys.executable, *flags, "-c", CODE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nrefused\n", "")
