"""Every subcommand of mlxlm-flash has a help text; --version and status show the installed versions."""

import importlib.metadata

import pytest
from click.testing import CliRunner
from mlxlm_flash_patch.cli import cli
from mlxlm_flash_patch.patch_points import POINTS


def invoke(*arguments):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("help_option", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), *((name,) for name in cli.commands)])
def test_help(command, help_option):
    text = invoke(*command, help_option)
    assert text.startswith("Usage: ")
    assert command or all(name in text for name in cli.commands)


def test_version():
    assert invoke("--version") == f"mlxlm-flash, version {importlib.metadata.version('mlxlm-flash-patch')}\n"


def test_status():
    text = invoke("status")
    for name in ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch"):
        assert f"{name} {importlib.metadata.version(name)}" in text
    assert "cpu: " in text
    assert "metal: " in text
    assert all(point.name in text for point in POINTS)
