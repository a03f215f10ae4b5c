"""An sdist holds what its package's folder holds under version control, and nothing else; wheels are built from it."""

import subprocess
import tarfile

import pytest
from build_wheels import PACKAGES, ROOT


@pytest.mark.parametrize("distribution", PACKAGES)
def test_content(sdist, distribution):
    folder = ROOT / "packages" / PACKAGES[distribution]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"no git checkout: {listed.stderr.strip()}")
    expected = {name for name in listed.stdout.splitlines() if (folder / name).exists()}
    with tarfile.open(sdist(distribution)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    # Hatchling adds the .gitignore that it went by, every build backend PKG-INFO.
    assert names - {".gitignore"} == expected | {"PKG-INFO"}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
