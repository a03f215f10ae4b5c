"""Checks that a Mac can load the wheel that is built here, as far as this can be checked without macOS."""

import pytest
from release_table import releases

from tests import launches
from tests.promises import promise

MLX_VERSION = releases()[-1].mlx


@promise("the wheel for macOS loads, as far as Linux can tell")
def test_every_check_passes(built):
    table = [line for line in built.printed.splitlines() if line.endswith((" ok", " WRONG"))]
    assert len(table) >= 10
    assert all(line.endswith(" ok") for line in table)
    assert built.exit_code == 0


def test_name_and_content(built):
    assert built.wheel.name.endswith("-cp311-abi3-macosx_14_0_arm64.whl")  # one wheel for every CPython from 3.11 on
    assert built.module_name == f"flashattn_core/_mlx_{MLX_VERSION.replace('.', '_')}/_ext.abi3.so"
    assert {"flashattn_core/__init__.py", "flashattn_core/_ext.pyi"} <= set(built.names)


def test_has_the_kernels_of_both_processors(built):
    assert b"NEON\0" in built.module
    assert launches.sources()
    for name, text in launches.sources().items():
        assert text.encode() in built.module, name


@pytest.mark.parametrize("macos", ["15.0", "26.0"])
def test_loads_beside_the_mlx_of_newer_systems(built, run, tmp_path, macos):
    wheels = [f"mlx=={MLX_VERSION}", f"mlx-metal=={MLX_VERSION}"]
    assert run("download.py", tmp_path, *wheels, "--macos", macos).returncode == 0
    assert f"macosx_{macos.replace('.', '_')}_arm64" in next(tmp_path.glob("mlx_metal-*.dist-info/WHEEL")).read_text()
    done = run("check.py", built.wheel, "--mlx", tmp_path / "mlx")
    assert done.returncode == 0, done.stdout
