"""The packages' versions, and those that they are made for, are the same wherever they stand; uv knows all sources."""

import re
import tomllib

import flashattn_core
import pytest
from build_wheels import PACKAGES, ROOT

EXACT = {
    "mlx": "0.32.4",
    "nanobind": "3.1.0",
    "nanobind-backend": "1.0.0",
    **dict.fromkeys(PACKAGES, flashattn_core.__version__),
}
PROJECTS = {name: ROOT / "packages" / folder / "pyproject.toml" for name, folder in PACKAGES.items()}


def read(distribution):
    return tomllib.loads(PROJECTS[distribution].read_text())


@pytest.mark.parametrize("distribution", PACKAGES)
def test_one_version_of_the_packages(distribution):
    assert read(distribution)["project"]["version"] == EXACT[distribution]


def test_who_installs_it_chooses_libmlx():
    """mlx-cpu and mlx-cuda-* own the same file: without an extra nothing may bring any of them."""
    core = read("flashattn-core")["project"]
    assert f"mlx=={EXACT['mlx']}" in core["dependencies"]
    for name in ("cpu", "cuda12", "cuda13"):
        assert core["optional-dependencies"][name] == [f"mlx[{name}]=={EXACT['mlx']}"]
    needed = [need for name in PACKAGES for need in read(name)["project"]["dependencies"]]
    assert [need for need in needed if re.match(r"(mlx|mlx-lm|flashattn-core)\[|mlx-(cpu|cuda)", need)] == []


def test_uv_builds_again_after_a_change_of_any_source():
    package = PROJECTS["flashattn-core"].parent
    keys = [key["file"] for key in read("flashattn-core")["tool"]["uv"]["cache-keys"]]
    known = {file for key in keys for file in package.glob(key)}
    assert {file for file in package.glob("csrc/**/*") if file.is_file()} - known == set()


@pytest.mark.parametrize("distribution", PACKAGES)
def test_pins(distribution):
    """What shares an ABI is pinned exactly, to one version everywhere."""
    project = read(distribution)
    requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
    found = [re.match(r"([\w-]+)(?:\[\w+\])?([^;]*)", line).groups() for line in requirements]
    assert [(name, pin) for name, pin in found if name in EXACT and pin != f"=={EXACT[name]}"] == []


def test_who_needs_which_mlx_lm():
    """The patch serves any release from the oldest tested one on; the evals use what one release has inside."""
    needs = {
        name: [need for need in read(name)["project"]["dependencies"] if need.startswith("mlx-lm")] for name in PROJECTS
    }
    assert needs == {"flashattn-core": [], "mlxlm-flash-patch": ["mlx-lm>=0.31.3"], "flash-evals": ["mlx-lm==0.32.2"]}


def test_of_the_workspace_the_changelog_and_the_wheel_for_macos():
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert workspace["project"]["version"] == flashattn_core.__version__
    assert f"nanobind=={EXACT['nanobind']}" in workspace["dependency-groups"]["dev"]
    [latest, *_] = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest == flashattn_core.__version__
    build = (ROOT / "packages/flashattn-core/macos/build.py").read_text()
    assert re.findall(r'"nanobind(==[^"]+)"', build) == [f"=={EXACT['nanobind']}"]
