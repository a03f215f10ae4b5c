"""Commands work if the home folder is missing, or nobody can write to it.

HOME is /proc or a folder in /proc, because not even root can create files there.
"""

import os
import sys

import pytest

from tests.patch.arms import ATTEND
from tests.promises import promise

CALL = f"import mlxlm_flash_patch as flash\nflash.enable(strict=True)\n{ATTEND}flash.disable()\nprint('ran')"
TURNS = pytest.mark.rotate(3)


@promise("a missing or read-only home folder does no harm")
@pytest.mark.slow("processes that import for seconds")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc; run this test on Linux")
@pytest.mark.parametrize("home", ["/proc/no/home", pytest.param("/proc", marks=TURNS)])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["mlxlm-flash", "doctor"], "flashattn-core"),
        pytest.param(["python", "-c", CALL], "ran\n", marks=TURNS),
        pytest.param(["mlxlm-flash", "status"], "flashattn-core", marks=TURNS),
        pytest.param(
            ["flash-eval", "kernels", "--shape", "2/1x8", "--seq-len", "16", "--impl", "flash"], "flash", marks=TURNS
        ),
    ],
    ids=lambda x: " ".join(x[:2]) if isinstance(x, list) else "",
)
def test_it_works(command, program, said, home):
    without = {name: None for name in os.environ if name.startswith(("XDG_", "HF_"))}
    done = command(*program, env={**without, "HF_HUB_OFFLINE": "1", "HOME": home}, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert "Traceback" not in done.stderr
