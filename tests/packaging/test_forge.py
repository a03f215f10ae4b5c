"""The files that the forge shows: issue forms, the citation, and the list of supported versions."""

import re
import tomllib

import flashattn_core
import mlxlm_flash_patch.cli
import pytest
import yaml

from tests.packaging.build_wheels import PACKAGES, ROOT, uv

FORMS = ROOT / ".github/ISSUE_TEMPLATE"
CHECK = ("run", "--no-project", "--with", "check-jsonschema==0.39.0", "check-jsonschema", "--builtin-schema")
SCHEMAS = {
    ".github/ISSUE_TEMPLATE/bug.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/mac.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/gpu.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "CITATION.cff": "vendor.citation-file-format",
}


@pytest.mark.parametrize("file", SCHEMAS)
def test_schema(file):
    assert "ok -- validation done" in uv(*CHECK, SCHEMAS[file], "--default-filetype", "yaml", ROOT / file)


def test_every_form_is_looked_at():
    assert {f".github/ISSUE_TEMPLATE/{path.name}" for path in FORMS.iterdir()} == SCHEMAS.keys() - {"CITATION.cff"}


@pytest.mark.parametrize("form", ["bug.yml", "mac.yml", "gpu.yml"])
def test_each_form_asks_for_doctor_s_report(form):
    """The form's command has only doctor's options, and the report is required."""
    [field] = [field for field in yaml.safe_load((FORMS / form).read_text())["body"] if field.get("id") == "doctor"]
    [command] = re.findall(r"`(?:uv run )?mlxlm-flash doctor ([^`]+)`", field["attributes"]["description"])
    options = {spelling for option in mlxlm_flash_patch.cli.cli.commands["doctor"].params for spelling in option.opts}
    assert "--json" in command
    assert {word for word in command.split() if word.startswith("--")} <= options
    assert field["validations"]["required"]


def test_the_citation_is_of_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == flashattn_core.__version__


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
