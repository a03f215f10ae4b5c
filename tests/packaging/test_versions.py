"""All files agree on the versions of the packages and of their requirements. uv rebuilds if a source changes."""

import re
import sys
import tomllib

import flashattn_core
import pytest
import release_table
import yaml
from release_table import releases

from tests.packaging.build_wheels import PACKAGES, ROOT
from tests.promises import promise

OLDEST, *_, NEWEST = releases()
MLX = f">={OLDEST.mlx},<={NEWEST.mlx}"
PINS = {"mlx": MLX, "nanobind-backend": "==1.0.0", **dict.fromkeys(PACKAGES, f"=={flashattn_core.__version__}")}
WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECTS = {name: ROOT / "packages" / folder / "pyproject.toml" for name, folder in PACKAGES.items()}


def read(distribution):
    return tomllib.loads(PROJECTS[distribution].read_text())


def test_one_version_of_the_packages():
    """The packages, the workspace, the newest entry of the changelog and the citation have the same version."""
    versions = {name: read(name)["project"]["version"] for name in PACKAGES}
    versions["workspace"] = WORKSPACE["project"]["version"]
    [versions["changelog"], *_] = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions["citation"] = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert versions == dict.fromkeys(versions, flashattn_core.__version__)


def test_who_installs_it_chooses_libmlx():
    """mlx-cpu and mlx-cuda-* install a file of the same name, libmlx. So packages may require them only in extras."""
    core = read("flashattn-core")["project"]
    assert sorted(core["dependencies"]) == [f"mlx{MLX}", f"nanobind-backend{PINS['nanobind-backend']}"]
    for name in ("cpu", "cuda12", "cuda13"):
        assert core["optional-dependencies"][name] == [f"mlx[{name}]{MLX}"]
    needed = [need for name in PACKAGES for need in read(name)["project"]["dependencies"]]
    assert [need for need in needed if re.match(r"(mlx|mlx-lm|flashattn-core)\[|mlx-(cpu|cuda)", need)] == []


def test_uv_builds_again_after_a_change_of_any_source():
    package = PROJECTS["flashattn-core"].parent
    keys = [key["file"] for key in read("flashattn-core")["tool"]["uv"]["cache-keys"]]
    known = {file for key in keys for file in package.glob(key)}
    assert {file for file in package.glob("csrc/**/*") if file.is_file()} - known == set()


@promise("pins and versions are the same everywhere")
@pytest.mark.parametrize("distribution", PACKAGES)
def test_pins(distribution):
    """Requirements name one exact version of nanobind-backend and of this project's packages, because packages that
    share an ABI must fit together. For MLX, requirements name a range, from the
    oldest release to the newest in releases.toml.
    """
    project = read(distribution)
    requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
    found = [re.match(r"([\w-]+)(?:\[\w+\])?([^;]*)", line).groups() for line in requirements]
    assert [(name, pin) for name, pin in found if pin != PINS.get(name, pin)] == []
    assert f"nanobind=={NEWEST.nanobind}" in WORKSPACE["dependency-groups"]["dev"]
    assert f"mlx=={NEWEST.mlx}" in WORKSPACE["project"]["dependencies"]  # for which the workspace builds its module


def test_the_build_takes_the_installed_mlx(monkeypatch, tmp_path):
    """The build looks for MLX in its own environment, then in that of the Python that runs pip. It takes the first
    release that it finds, or the newest release if it finds none.
    """

    def required(*folders):
        monkeypatch.setattr(release_table.sys, "path", folders[:1])
        monkeypatch.setattr(release_table.sysconfig, "get_path", lambda name: str(folders[-1]))
        return release_table.build_requirements()

    def installed(version):
        info = tmp_path / f"{version}/mlx-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mlx\nVersion: {version}\n")
        return str(info.parent)

    mlx = "mlx[cpu]" if sys.platform == "linux" else "mlx"
    nothing, oldest, newest = str(tmp_path / "nothing"), installed(OLDEST.mlx), installed(NEWEST.mlx)
    for folders, release in (
        ((oldest, newest), OLDEST),
        ((newest, oldest), NEWEST),
        ((nothing, oldest), OLDEST),
        ((nothing, nothing), NEWEST),
    ):
        assert required(*folders) == [f"{mlx}=={release.mlx}", f"nanobind=={release.nanobind}"]
    with pytest.raises(LookupError, match=rf"cannot be built for mlx 0\.1, only for {re.escape(OLDEST.mlx)}, "):
        required(installed("0.1"))
