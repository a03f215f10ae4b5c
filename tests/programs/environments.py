"""An environment for another program, with the program from the package index and this project's wheels.

tests/builds.py keeps the environment until a version or one of our wheels changes. If the index lacks a requirement,
the test is skipped. If a requirement conflicts with our wheels, the test fails. mlx-lm is installed only if the program
requires it, because the patch must work without mlx-lm.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.builds import built
from tests.packaging.build_wheels import clean_environment, uv

SCRIPTS = Path(__file__).parent / "scripts"
LAST_LINE = re.compile(r"\[mlxlm-flash\] flash attention ran: (.+) · fallbacks: none")
MLX = f"mlx[cpu]=={version('mlx')}"


class Environment:
    def __init__(self, wheels: list[Path], *requirements: str) -> None:
        self.wheels, self.requirements = wheels, (*requirements, MLX)
        key = (sys.version, *self.requirements, *(wheel.read_bytes() for wheel in wheels))
        self.bin = built(self._make, "environment", *key) / "bin"

    def _make(self, folder: Path) -> None:
        uv("venv", "--quiet", "--relocatable", "--no-project", "--python", sys.executable, folder)
        install = ("pip", "install", "--quiet", "--python", folder / "bin/python")
        try:
            uv(*install, *self.requirements)
        except RuntimeError as error:
            *_, reason = str(error).strip().splitlines()
            pytest.skip(f"no environment for {self.requirements[0]}: {reason}")
        brings_mlx_lm = bool([*folder.glob("lib/python*/site-packages/mlx_lm")])
        uv(*install, *self.wheels, *self.requirements)
        if not brings_mlx_lm:
            uv("pip", "uninstall", "--quiet", "--python", folder / "bin/python", "mlx-lm")

    def check(self, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Runs a program of the venv with HF_HUB_OFFLINE=1. Its exit code must be 0."""
        env = {**clean_environment(), "HF_HUB_OFFLINE": "1", "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        command = [str(self.bin / name), *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{name} {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done


def kernels_of(flash_run: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Reads from the last line of `mlxlm-flash run` how often each kernel ran. No call may have fallen back."""
    *_, last_line = flash_run.stderr.strip().splitlines()
    ran = LAST_LINE.fullmatch(last_line)
    assert ran, last_line
    counts = (kernel.split() for kernel in ran[1].split(", "))
    return {name: int(count.replace(",", "")) for name, count in counts}
