"""check.py finds and names what is wrong with a wheel for macOS."""

import zipfile

import pytest


def unchanged(module):
    return module


def a_symbol_that_nothing_has(module):
    name = b"__ZN3mlx4core5metal19get_command_encoderENS0_6StreamE"
    assert name in module
    return module.replace(name, name.replace(b"get", b"got"))


def a_changed_byte(module):
    position = 5 * 4096 + 17
    return module[:position] + bytes([module[position] ^ 1]) + module[position + 1 :]


def another_folder_for_libmlx(module):
    return module.replace(b"@loader_path/../../mlx/lib", b"@loader_path/../../mlx/bin")


def another_macos(module):
    # LC_BUILD_VERSION has the command 0x32, its size, platform 1 (macOS) and the lowest macOS version, here 14 << 16.
    position = module.index(b"\x32\0\0\0\x20\0\0\0\1\0\0\0") + 14
    return module[:position] + bytes([26]) + module[position + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unchanged, None),
        (a_symbol_that_nothing_has, "not there: mlx::core::metal::got_command_encoder(mlx::core::Stream)\n"),
        (a_changed_byte, "wrong hashes for page 5 of"),
        (another_folder_for_libmlx, "expected @loader_path/../../mlx/lib\n"),
        (another_macos, "expected macos from 14.0 on"),
    ],
)
def test_a_change_of_the_module(built, run, tmp_path, change, message):
    changed = tmp_path / built.wheel.name
    with zipfile.ZipFile(built.wheel) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, change(built.module) if name == built.module_name else source.read(name))
    done = run("check.py", changed, "--mlx", built.mlx)
    assert done.returncode == (message is not None), done.stdout
    assert message is None or message in done.stdout
