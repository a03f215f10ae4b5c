# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "cmake>=3.27,<5",
#   "lief==1.0.0",
#   "ninja>=1.11,<2",
#   "scikit-build-core>=0.11,<2",
#   "ziglang==0.17.1",
# ]
# ///
"""Builds on Linux flashattn-core's wheel for macOS on arm64, and checks the wheel.

    uv run packages/flashattn-core/macos/build.py --output dist [--mlx 0.32.3]

The wheel has the module for one release of MLX: the newest of releases.toml, unless --mlx names another. The script
lists the packages that only it needs (among them a compiler of 100 MB), so that uv installs them apart from the
workspace's environment. The exit code is 1 if the wheel is wrong, 2 if this machine lacks something.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from check import check_wheel
from download import MINIMUM_MACOS, DownloadError, cannot, download
from scikit_build_core.build import build_wheel
from sysroot import ZIG, make_sysroot

HERE = Path(__file__).parent
PACKAGE = HERE.parent
sys.path.append(str(PACKAGE / "releases"))
from release_table import Release, release, releases  # noqa: E402

TOOLS = {"clang++-19": "clang-19", "ld64.lld-19": "lld-19"}  # program -> Debian's package


def missing_tools() -> list[str]:
    """Returns a line for each missing program, which says how to install the program."""
    return [
        f"{program} is missing: apt-get install {package}"
        for program, package in TOOLS.items()
        if shutil.which(program) is None
    ]


def add_nanobind(folder: Path, version: str) -> None:
    """Installs nanobind into `folder`, and sets PYTHONPATH so that CMake's Python finds it there."""
    uv = os.environ.get("UV") or shutil.which("uv") or "uv"
    subprocess.run([uv, "pip", "install", "--quiet", f"--target={folder}", f"nanobind=={version}"], check=True)
    os.environ["PYTHONPATH"] = str(folder)


def build(output: Path, work: Path, beside: Release) -> tuple[Path, Path]:
    """Builds the wheel into `output`. Returns the wheel's path, and the folder of MLX's package for macOS."""
    download(work / "wheels", f"mlx=={beside.mlx}", f"mlx-metal=={beside.mlx}")
    add_nanobind(work / "nanobind", beside.nanobind)
    mlx = work / "wheels/mlx"
    make_sysroot(work / "sysroot")
    os.environ |= {
        "FLASHATTN_ZIG": str(ZIG / "zig"),
        "FLASHATTN_CLANG": str(shutil.which("clang++-19")),
        "FLASHATTN_SYSROOT": str(work / "sysroot"),
        "FLASHATTN_MLX": str(mlx),
        # The platform in the wheel's name.
        "_PYTHON_HOST_PLATFORM": f"macosx-{MINIMUM_MACOS}-arm64",
        "FLASHATTN_SOABI": f"cpython-3{sys.version_info.minor}-darwin",
    }
    os.chdir(PACKAGE)  # a build backend expects to run in the package's folder
    name = build_wheel(
        str(output),
        {
            "build-dir": str(work / "build"),
            "cmake.define.CMAKE_TOOLCHAIN_FILE": str(HERE / "toolchain.cmake"),
            "install.strip": "false",  # because stripping invalidates the file's signature
            "wheel.py-api": "cp311" if beside.has_stable_abi else "",
        },
    )
    return output / name, mlx


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder for the wheel (%(default)s)")
    parser.add_argument("--mlx", default=releases()[-1].mlx, help="the release of MLX (%(default)s)")
    parser.add_argument("--work", type=Path, help="folder for everything in between, kept (otherwise a temporary one)")
    arguments = parser.parse_args()
    if missing := missing_tools():
        cannot("\n".join(missing))
    output = arguments.output.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        try:
            wheel, mlx = build(output, work, release(arguments.mlx))
        except DownloadError as error:
            cannot(str(error))
        print(f"\n{wheel}")
        return check_wheel(wheel, mlx)


if __name__ == "__main__":
    sys.exit(main())
