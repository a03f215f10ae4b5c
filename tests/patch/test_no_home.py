"""Without a home, or with one that cannot be written to, everything works that needs none.

HOME is /proc, where nobody can make anything, root neither, of whom file modes do not speak; or a folder in it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import mlx.core as mx, mlxlm_flash_patch as flash
from mlx_lm.models.qwen2 import scaled_dot_product_attention as before
x = mx.ones((1, 2, 12, 8))
flash.enable(strict=True)
from mlx_lm.models.qwen2 import scaled_dot_product_attention
print((scaled_dot_product_attention(x, x, x, cache=None, scale=1.0, mask="causal") == 1).all().item())
flash.disable()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc; run this test on Linux")
@pytest.mark.parametrize("home", ["/proc", "/proc/no/home"])
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["python", "-c", CALL], "True\n"),
        (["mlxlm-flash", "status"], "flashattn-core"),
        (["mlxlm-flash", "doctor"], "flashattn-core"),
        (["flash-eval", "doctor"], "flashattn-core"),
        (["flash-eval", "kernels", "--shape", "2/1x8", "--seq-len", "16", "--impl", "flash"], "flash"),
    ],
    ids=lambda x: " ".join(x[:2]) if isinstance(x, list) else "",
)
def test_it_works(command, said, home):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "HF_"))}
    env |= {"HOME": home, "HF_HUB_OFFLINE": "1"}
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run(
        [program, *command[1:]], env=env, capture_output=True, text=True, timeout=180, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert "Traceback" not in done.stderr
