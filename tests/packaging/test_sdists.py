"""An sdist has exactly those files of its package's folder that git does not ignore.

If the repository's address is given, the sdist's metadata and README link to the repository.
"""

import re
import subprocess
import tarfile
from email.parser import Parser

import pytest

from tests.packaging.build_wheels import PACKAGES, ROOT, build_sdist
from tests.promises import promise

ADDRESS = "https://forge.invalid/owner/name"


@promise("sdists hold the files under version control")
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
    # The build backend hatchling adds the .gitignore that it has read. Every build backend adds PKG-INFO.
    assert names - {".gitignore"} == expected | {"PKG-INFO"}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.parametrize("distribution", PACKAGES)
def test_links_to_the_repository(distribution, tmp_path):
    """Each page to which the sdist links exists in the repository."""
    with tarfile.open(build_sdist(distribution, tmp_path, ADDRESS)) as archive:
        [name] = [name for name in archive.getnames() if name.endswith("/PKG-INFO")]
        said = Parser().parsestr(archive.extractfile(name).read().decode())
    urls = dict(line.split(", ") for line in said.get_all("Project-URL"))
    assert urls.keys() == {"Repository", "Documentation", "Changelog", "Issues"}
    assert urls["Repository"] == ADDRESS
    links = [*urls.values(), *re.findall(r"\]\(([^)]*)\)", said.get_payload())]
    assert [link for link in links if not link.startswith("https://")] == []
    pages = [link.partition(f"/blob/v{said['Version']}/")[2] for link in links if link.startswith(f"{ADDRESS}/blob/")]
    assert [page for page in pages if not (ROOT / page.partition("#")[0]).is_file()] == []
