"""If MLX's build for CUDA is installed, installing the packages adds no second build of libmlx."""

import sys
import zipfile
from importlib.metadata import distribution, version

import pytest

from tests.packaging.virtual_environment import Environment

pytestmark = [
    pytest.mark.nightly("installs the three wheels"),
    pytest.mark.skipif(sys.platform != "linux", reason="on macOS libmlx is a part of mlx"),
]
OTHER = b"another build"


def stand_in(folder):
    """A small wheel that stands in for mlx-cuda-12's wheel of hundreds of MB, and has libmlx.so at the same path."""
    info = f"mlx_cuda_12-{version('mlx')}"
    wheel = folder / f"{info}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in distribution("mlx-cpu").files:
            if ".dist-info" not in str(file):
                archive.writestr(str(file), file.read_binary() + (OTHER if file.name == "libmlx.so" else b""))
        archive.writestr(
            f"{info}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: mlx-cuda-12\nVersion: {version('mlx')}\n"
        )
        archive.writestr(f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}.dist-info/RECORD", "".join(f"{name},,\n" for name in archive.namelist()))
    return wheel


def test_mlx_s_build_for_cuda_stays_as_it_is(wheels, tmp_path):
    environment = Environment(tmp_path)
    environment.install_needed(wheels, extra="")
    environment.install({"mlx-cuda-12": stand_in(tmp_path)})
    environment.install(wheels)
    assert (environment.site_packages / "mlx/lib/libmlx.so").read_bytes().endswith(OTHER)
    environment.check("python", "-c", "import flashattn_core")
    environment.check("pip", "uninstall", "--quiet", "--yes", "mlx-cuda-12")
    without = environment.run("python", "-c", "import flashattn_core")
    assert "pip install 'flashattn-core[cpu]', or [cuda12] or [cuda13] for an NVIDIA GPU" in without.stderr
