"""The forge's workflow: by its schema, with exact versions of what it uses, and with commands that exist."""

import os
import re

import pytest
import yaml
from build_wheels import ROOT, uv

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
assert WORKFLOWS
SIMPLE = {"python3 -m pip install uv", "uv run pytest", 'git config --global --add safe.directory "$GITHUB_WORKSPACE"'}
SCHEMA = ("--with", "check-jsonschema==0.39.0", "check-jsonschema", "--builtin-schema", "vendor.github-workflows")


def jobs(workflow):
    return yaml.safe_load(workflow.read_text())["jobs"]


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def workflow(request):
    return request.param


@pytest.fixture
def steps(workflow):
    return [step for job in jobs(workflow).values() for step in job["steps"]]


def test_schema(workflow):
    assert "ok -- validation done" in uv("run", "--no-project", *SCHEMA, workflow)


def test_exact_versions_of_actions(steps):
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", name)] == []


def test_commands_exist(steps):
    """Programs of the repository are there and can be run, make's targets are in the Makefile."""
    commands = [step["run"].split() for step in steps if "run" in step]
    assert [".ci/run"] in commands
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, *arguments in commands:
        if "/" in program:
            assert os.access(ROOT / program, os.X_OK), program
        elif program == "make":
            assert set(arguments) <= set(targets)
        else:
            assert " ".join([program, *arguments]) in SIMPLE


def test_linux_and_macos_build_and_test(workflow):
    platforms = {entry["name"] for entry in jobs(workflow)["wheels"]["strategy"]["matrix"]["include"]}
    assert platforms == {"linux-x86_64", "linux-aarch64", "macos-arm64"}
    for system, image in (("linux", "ubuntu-"), ("macos", "macos-")):
        assert jobs(workflow)[f"tests-on-{system}"]["runs-on"].startswith(image)
