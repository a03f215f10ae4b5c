"""The wheel for all releases of MLX works with each release in releases.toml. follow.py adds new releases to it."""

import subprocess
import sys
from unittest.mock import Mock

import follow
import pytest
import release_table
from release_table import releases

from tests.core.programs import library, preloads
from tests.packaging.build_wheels import PACKAGES, ROOT
from tests.packaging.virtual_environment import Environment
from tests.promises import promise

EACH = [release.mlx for release in releases()]
NEEDED = ("hypothesis", "pytest", "filelock", "pytest-xdist", "cmake", "ninja", "pyyaml")
SUITES = {
    "core": [f"tests/core/test_{name}.py" for name in ("masks", "quantised", "transforms", "errors")],
    "patch": [f"tests/patch/test_{name}.py" for name in ("enable", "fallbacks", "quantised_cache", "described_masks")],
}
takes_minutes = pytest.mark.nightly("builds the extension for each release of MLX")


@pytest.fixture(scope="session")
def all_wheels(wheel):
    """Maps a package's name to its wheel. flashattn-core's wheel is built for all releases of MLX."""
    return {distribution: wheel(distribution, sys.executable) for distribution in PACKAGES}


@pytest.fixture(scope="session", params=EACH)
def beside(request, all_wheels, tmp_path_factory):
    """An environment with one release of MLX, the wheels, and the packages that the tests need."""
    environment = Environment(tmp_path_factory.mktemp("beside"))
    environment.install_needed(all_wheels, extra="cpu", also=(f"mlx[cpu]=={request.param}", *NEEDED))
    environment.install(all_wheels)
    environment.mlx = request.param
    return environment


@takes_minutes
def test_the_module_is_that_of_the_release(beside):
    code = "import flashattn_core, mlx.core as mx; print(mx.__version__, flashattn_core._ext.__file__)"
    version, file = beside.check("python", "-c", code).split()
    assert version == beside.mlx
    assert f"/flashattn_core/_mlx_{version.replace('.', '_')}/_ext." in file


@promise("the wheel works beside each release of MLX in the table")
@takes_minutes
@pytest.mark.parametrize("suite", SUITES)
def test_a_short_suite(beside, suite):
    command = [beside.venv / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITES[suite]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.splitlines()[-1])


@takes_minutes
@preloads
def test_beside_mlx_for_cuda_without_its_encoder(beside, tmp_path):
    """The CUDA kernels need MLX's command encoder, which older releases do not export. With an older release,
    backends() says which release to install. A preloaded library makes MLX's CPU build report that it has CUDA.
    """
    has_cuda = library(tmp_path / "cuda.so", "namespace mlx::core::cu { bool is_available() { return true; } }")
    oldest = next(release.mlx for release in releases() if release.cuda)
    if release_table.release(beside.mlx).cuda:
        pytest.skip(f"mlx {beside.mlx} exports its encoder; tests/cuda runs on a GPU")
    code = "import flashattn_core; print(flashattn_core.backends()['cuda'])"
    said = beside.check("python", "-c", code, LD_PRELOAD=has_cuda).strip()
    assert said == (
        f"the CUDA kernels need mlx {oldest} or newer, but this is mlx {beside.mlx}: "
        f"pip install 'mlx[cuda13]=={oldest}', or [cuda12]"
    )


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """A copy of the files that follow.py changes."""
    for file in ("packages/flashattn-core/releases.toml", *follow.NAMING):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    table = tmp_path / "packages/flashattn-core/releases.toml"
    monkeypatch.setattr(follow, "ROOT", tmp_path)
    monkeypatch.setattr(follow, "TABLE", table)
    monkeypatch.setattr(follow, "releases", lambda: releases(table))
    return tmp_path


def stand_ins(monkeypatch, **others):
    """Replaces the steps of follow() that download or build. `others` maps a step to its result or to a function."""
    steps = {"fetch": None, "nanobind_abi": "v22", "exported": {"mlx-cuda-12": {follow.ENCODER}}}
    steps |= dict.fromkeys(("build_for_linux", "compare_symbols", "build_for_macos", "compare_attention", "run_tests"))
    for name, value in (steps | others).items():
        monkeypatch.setattr(follow, name, value if callable(value) else lambda *_, value=value: value)


def test_following_a_release_adds_its_row(repository, monkeypatch, tmp_path):
    stand_ins(monkeypatch)
    follow.follow("0.99.1", tmp_path / "work")
    added = follow.releases()[-1]
    assert (added.mlx, added.nanobind_abi, added.cuda) == ("0.99.1", "v22", True)
    assert '"mlx>=' + EACH[0] + ',<=0.99.1"' in (repository / "packages/flashattn-core/pyproject.toml").read_text()
    assert '"mlx==0.99.1"' in (repository / "pyproject.toml").read_text()
    assert "| 0.99.1 | 3.11 and newer | run | built, not run | built |" in (repository / "docs/support.md").read_text()
    assert "mlx[cpu]==0.99.1" in (repository / "examples/README.md").read_text()


@promise("make follow adds only a release that works")
def test_what_cannot_be_followed_changes_nothing(repository, monkeypatch, tmp_path):
    stand_ins(monkeypatch, run_tests=Mock(side_effect=follow.Stop("a test fails")))
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    with pytest.raises(follow.Stop, match="a test fails"):
        follow.follow("0.99.1", tmp_path / "work")
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(follow.Stop, match="is not new"):
        follow.follow(EACH[0], tmp_path / "work")
