"""The workflows in .github pin exact versions of actions, and run commands that exist."""

import os
import re
import subprocess

import pytest
import yaml
from mlxlm_flash_patch.cli import cli

from tests.docs.test_code_blocks import options_exist
from tests.packaging.build_wheels import ROOT

WORKFLOWS = RELEASE, _, WHEELS = sorted((ROOT / ".github/workflows").iterdir())
STOP_UNLESS_THE_TAG_IS_THE_VERSION = 'test -f "dist/$FILES-${GITHUB_REF_NAME#v}.tar.gz"'
TAKE_A_PACKAGE_S_FILES = 'mkdir publish && mv "dist/$FILES-"* publish/'
DOCTOR = "uv run mlxlm-flash doctor"
MLX_LM = "git+https://github.com/ml-explore/mlx-lm"
SIMPLE = {
    "python3 -m pip install uv",
    "uv run pytest tests",
    "uv sync",
    f"uv pip install {MLX_LM}",
    "uv run --no-sync pytest -n 2 --dist loadfile tests/patch",
    'git config --global --add safe.directory "$GITHUB_WORKSPACE"',
    STOP_UNLESS_THE_TAG_IS_THE_VERSION,
    TAKE_A_PACKAGE_S_FILES,
}


def jobs(workflow):
    return yaml.safe_load(workflow.read_text())["jobs"]


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def steps(request):
    return [step for job in jobs(request.param).values() for step in job.get("steps", [])]


def run_with(command, folder, **variables):
    return subprocess.run(["bash", "-ec", command], cwd=folder, env={**os.environ, **variables}, check=False).returncode


def test_exact_versions_of_actions(steps):
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", name)] == []


def test_commands_exist(steps):
    """The repository's programs exist and are executable, and make's targets are in the Makefile."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in (step["run"] for step in steps if "run" in step):
        program, *arguments = command.split()
        if program.startswith("."):
            assert os.access(ROOT / program, os.X_OK), program
        elif program == "make":
            assert set(arguments) <= set(targets)
        elif command.startswith(DOCTOR):
            options_exist(cli, command.partition("mlxlm-flash ")[2].split())
        else:
            assert command in SIMPLE


def test_only_the_release_may_act_for_the_repository():
    for workflow in WORKFLOWS:
        assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    granted = {name: job.get("permissions") for path in WORKFLOWS for name, job in jobs(path).items()}
    assert {name: each for name, each in granted.items() if each} == {"publish": {"id-token": "write"}}


@pytest.mark.parametrize(("tag", "code"), [("v1.2.3", 0), ("v1.2.30", 1)])
def test_a_tag_that_is_not_the_version_stops_the_release(tmp_path, tag, code):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/flash_evals-1.2.3.tar.gz").touch()
    names = {"FILES": "flash_evals", "GITHUB_REF_NAME": tag}
    assert run_with(STOP_UNLESS_THE_TAG_IS_THE_VERSION, tmp_path, **names) == code


def test_a_package_s_files_are_taken(tmp_path):
    (tmp_path / "dist").mkdir()
    for entry in jobs(RELEASE)["publish"]["strategy"]["matrix"]["include"]:
        (tmp_path / f"dist/{entry['package'].replace('-', '_')}-1.2.3.tar.gz").touch()
    assert run_with(TAKE_A_PACKAGE_S_FILES, tmp_path, FILES="flash_evals") == 0
    assert [path.name for path in (tmp_path / "publish").iterdir()] == ["flash_evals-1.2.3.tar.gz"]
