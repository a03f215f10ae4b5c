"""Tests files for the website that hosts the repository: issue forms, workflows, citation, and supported versions."""

import re
import tomllib

import pytest
import yaml
from mlxlm_flash_patch.cli import cli

from tests.docs.test_code_blocks import options_exist
from tests.packaging.build_wheels import PACKAGES, ROOT, uv

FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))  # all but config.yml
CHECK = ("run", "--no-project", "--with", "check-jsonschema==0.39.0", "check-jsonschema", "--builtin-schema")
SCHEMAS = {
    **dict.fromkeys(FORMS, "vendor.github-issue-forms"),
    **dict.fromkeys((ROOT / ".github/workflows").iterdir(), "vendor.github-workflows"),
    ROOT / ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    ROOT / "CITATION.cff": "vendor.citation-file-format",
}


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.name)
def test_schema(file):
    assert "ok -- validation done" in uv(*CHECK, SCHEMAS[file], "--default-filetype", "yaml", file)


def test_each_form_asks_for_doctor_s_report():
    """The command in each form has only options that `mlxlm-flash doctor` has. The field for its report is required."""
    assert [form.stem for form in FORMS] == ["bug", "gpu", "mac"]
    for form in FORMS:
        [field] = [field for field in yaml.safe_load(form.read_text())["body"] if field.get("id") == "doctor"]
        [command] = re.findall(r"`(?:uv run )?mlxlm-flash (doctor [^`]+)`", field["attributes"]["description"])
        assert "--json" in command
        options_exist(cli, command.split())
        assert field["validations"]["required"]


def test_the_page_of_support_has_the_versions_that_the_packages_ask_for():
    projects = [
        tomllib.loads((ROOT / "packages" / folder / "pyproject.toml").read_text())["project"]
        for folder in PACKAGES.values()
    ]
    page = (ROOT / "docs/support.md").read_text()
    asked = {need for project in projects for need in project["dependencies"] if re.match(r"mlx(-lm)?\W", need)}
    assert {need for need in asked if f"`{need}`" not in page} == set()
    pythons = {each.rpartition(" ")[2] for project in projects for each in project["classifiers"] if " :: 3." in each}
    assert [version for version in sorted(pythons) if version not in page] == []
