"""What is wrong with a wheel for macOS is found, and named."""

import zipfile

import pytest


@pytest.fixture
def with_module(built, tmp_path):
    """The wheel with other bytes for the module."""

    def replace(module):
        changed = tmp_path / built.wheel.name
        with zipfile.ZipFile(built.wheel) as source, zipfile.ZipFile(changed, "w") as target:
            for name in source.namelist():
                target.writestr(name, module if name == built.module_name else source.read(name))
        return changed

    return replace


def test_unchanged(built, run, with_module):
    done = run("check.py", with_module(built.module), "--mlx", built.mlx)
    assert done.returncode == 0, done.stdout


# Up to 0.31.1 the encoder was had from the device, by another function.
@pytest.mark.parametrize(
    ("version", "missing"),
    [
        ("0.31.1", "mlx::core::metal::get_command_encoder(mlx::core::Stream)"),
        ("0.32.0", "mlx::core::array::set_data(mlx::core::allocator::Data)"),
    ],
)
def test_another_mlx_lacks_a_symbol(built, run, tmp_path, version, missing):
    assert run("download.py", tmp_path, f"mlx=={version}", f"mlx-metal=={version}").returncode == 0
    done = run("check.py", built.wheel, "--mlx", tmp_path / "mlx")
    assert done.returncode == 1
    assert f"not there: {missing}\n" in done.stdout


def test_a_symbol_that_nothing_has(built, run, with_module):
    name = b"__ZN3mlx4core5metal19get_command_encoderENS0_6StreamE"
    assert name in built.module
    done = run("check.py", with_module(built.module.replace(name, name.replace(b"get", b"got"))), "--mlx", built.mlx)
    assert done.returncode == 1
    assert "not there: mlx::core::metal::got_command_encoder(mlx::core::Stream)\n" in done.stdout


def test_a_changed_byte(built, run, with_module):
    module = bytearray(built.module)
    module[5 * 4096 + 17] ^= 1
    done = run("check.py", with_module(bytes(module)), "--mlx", built.mlx)
    assert done.returncode == 1
    assert "wrong hashes for page 5 of" in done.stdout


def test_another_folder_for_libmlx(built, run, with_module):
    module = built.module.replace(b"@loader_path/../mlx/lib", b"@loader_path/../mlx/bin")
    done = run("check.py", with_module(module), "--mlx", built.mlx)
    assert done.returncode == 1
    assert "expected @loader_path/../mlx/lib\n" in done.stdout


def test_another_macos(built, run, with_module):
    # LC_BUILD_VERSION: command 0x32, size, platform 1 (macOS), the lowest version as 14 << 16.
    position = built.module.index(b"\x32\0\0\0\x20\0\0\0\1\0\0\0")
    module = bytearray(built.module)
    module[position + 14] = 26
    done = run("check.py", with_module(bytes(module)), "--mlx", built.mlx)
    assert done.returncode == 1
    assert "expected macos from 14.0 on" in done.stdout
