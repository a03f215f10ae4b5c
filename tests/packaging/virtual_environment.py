"""An isolated virtual environment, like that of a user who has installed the wheels."""

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from tests.packaging.build_wheels import PACKAGES, clean_environment, uv

MODULES = ("flashattn_core", "mlxlm_flash_patch", "flash_evals")


def metadata(wheel: Path) -> Message:
    """The METADATA file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


class Environment:
    """A virtual environment with pip. Its programs run with an empty home folder and an empty working folder."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.venv, self.home, self.work = folder / "venv", folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        uv("venv", "--quiet", "--seed", "--no-project", "--python", python, self.venv)
        [self.site_packages] = self.venv.glob("lib/python*/site-packages")

    def install_needed(self, wheels: dict[str, Path], extra: str, also: Sequence[str] = ()) -> None:
        """Installs the wheels' requirements and `also` from the index. Lists all files of the venv in `without_us`."""
        lines = {line for wheel in wheels.values() for line in metadata(wheel).get_all("Requires-Dist", [])}
        needs = [need for need in map(Requirement, sorted(lines)) if need.name not in PACKAGES]
        wanted = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
        others = [f"{need.name}[{','.join(need.extras)}]{need.specifier}" for need in wanted]
        uv("pip", "install", "--quiet", "--python", self.venv / "bin/python", *others, *also)
        self.without_us = self.files()

    def install(self, wheels: dict[str, Path]) -> None:
        """Installs the wheels by pip, which fails if they need a package that is not installed."""
        self.check("pip", "install", "--quiet", "--no-index", *wheels.values())

    def run(self, name: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the venv with HF_HUB_OFFLINE=1, and with `variables` as further environment variables."""
        path = f"{self.venv / 'bin'}:/usr/bin:/bin"
        env = {**clean_environment(), "PATH": path, "HOME": str(self.home), "HF_HUB_OFFLINE": "1", **variables}
        command = [str(self.venv / "bin" / name), *map(str, arguments)]
        return subprocess.run(command, cwd=self.work, env=env, capture_output=True, text=True, timeout=300, check=False)

    def check(self, name: str, *arguments: object, **variables: str) -> str:
        """Like run(), but returns stdout. Raises AssertionError with all output if the exit code is not 0."""
        done = self.run(name, *arguments, **variables)
        assert done.returncode == 0, f"{name} {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def files(self) -> set[str]:
        """All files of the virtual environment, without the bytecode of other projects' packages."""
        files = (str(path.relative_to(self.venv)) for path in self.venv.rglob("*"))
        return {file for file in files if "__pycache__" not in file or any(name in file for name in MODULES)}
