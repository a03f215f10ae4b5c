# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "cmake>=3.27,<5",
#   "lief==1.0.0",
#   "nanobind==3.1.0",
#   "ninja>=1.11,<2",
#   "scikit-build-core>=0.11,<2",
#   "ziglang==0.17.1",
# ]
# ///
"""Builds flashattn-core's wheel for macOS on arm64, on Linux, and checks it.

    uv run packages/flashattn-core/macos/build.py --output dist

What is needed here and nowhere else (a compiler of 100 MB) is listed above, for uv to keep apart from the workspace's
environment. The exit code is 1 if the wheel is wrong, 2 if this machine lacks something.
"""

import argparse
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from check import check_wheel
from download import MINIMUM_MACOS, DownloadError, cannot, download
from scikit_build_core.build import build_wheel
from sysroot import ZIG, make_sysroot

HERE = Path(__file__).parent
PACKAGE = HERE.parent
TOOLS = {"clang++-19": "clang-19", "ld64.lld-19": "lld-19"}  # program: Debian's package


def missing_tools() -> list[str]:
    """For each program that is not there, what to do."""
    return [
        f"{program} is missing: apt-get install {package}"
        for program, package in TOOLS.items()
        if shutil.which(program) is None
    ]


def mlx_version() -> str:
    """The version that the package is pinned to on macOS."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    return str(next(line.removeprefix("mlx==") for line in project["dependencies"] if line.startswith("mlx==")))


def build(output: Path, work: Path) -> tuple[Path, Path]:
    """Builds the wheel into `output`; returns it and the folder of MLX's macOS wheel."""
    version = mlx_version()
    download(work / "wheels", f"mlx=={version}", f"mlx-metal=={version}")
    mlx = work / "wheels/mlx"
    make_sysroot(work / "sysroot")
    os.environ |= {
        "FLASHATTN_ZIG": str(ZIG / "zig"),
        "FLASHATTN_CLANG": str(shutil.which("clang++-19")),
        "FLASHATTN_SYSROOT": str(work / "sysroot"),
        "FLASHATTN_MLX": str(mlx),
        # What Python calls its platform on the Mac.
        "_PYTHON_HOST_PLATFORM": f"macosx-{MINIMUM_MACOS}-arm64",
    }
    os.chdir(PACKAGE)  # where a build backend expects to be
    name = build_wheel(
        str(output),
        {
            "build-dir": str(work / "build"),
            "cmake.define.CMAKE_TOOLCHAIN_FILE": str(HERE / "toolchain.cmake"),
            "install.strip": "false",  # a changed file would lose its signature
        },
    )
    return output / name, mlx


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder for the wheel (%(default)s)")
    parser.add_argument("--work", type=Path, help="folder for everything in between, kept (otherwise a temporary one)")
    arguments = parser.parse_args()
    if missing := missing_tools():
        cannot("\n".join(missing))
    output = arguments.output.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        try:
            wheel, mlx = build(output, work)
        except DownloadError as error:
            cannot(str(error))
        print(f"\n{wheel}")
        return check_wheel(wheel, mlx)


if __name__ == "__main__":
    sys.exit(main())
