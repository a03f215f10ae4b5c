# /// script
# requires-python = ">=3.11"
# ///
"""Downloads and unpacks macOS wheels, mainly for MLX's headers and the libmlx.dylib that a Mac has.

    uv run packages/flashattn-core/macos/download.py FOLDER mlx==VERSION mlx-metal==VERSION [--macos 26.0]

MLX publishes one build for each of macOS 14, 15 and 26; pip takes the newest that the Mac can run. uv keeps
what it has downloaded in its own cache, so that a second call needs no network.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

MINIMUM_MACOS = "14.0"


class DownloadError(Exception):
    """The wheels could not be downloaded."""


def download(folder: Path, *requirements: str, macos: str = MINIMUM_MACOS) -> None:
    """Unpacks into `folder` the wheels that pip installs on a Mac with macOS `macos` and this version of Python."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise DownloadError("uv is missing: python3 -m pip install uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", f"--target={folder}"]
    command += ["--python-platform=aarch64-apple-darwin", f"--python={sys.executable}"]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": macos}
    done = subprocess.run([*command, *requirements], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise DownloadError(f"{' '.join(requirements)} for macOS could not be had. uv says:\n{done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("requirements", nargs="+")
    parser.add_argument("--macos", default=MINIMUM_MACOS, help="(%(default)s)")
    arguments = parser.parse_args()
    try:
        download(arguments.folder, *arguments.requirements, macos=arguments.macos)
    except DownloadError as error:
        cannot(str(error))


def cannot(reason: str) -> NoReturn:
    """Prints the reason, and ends the program with exit code 2, because this machine lacks something."""
    print(reason, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
