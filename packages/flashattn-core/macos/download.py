# /// script
# requires-python = ">=3.11"
# ///
"""Published macOS wheels, unpacked: above all MLX's headers and the libmlx.dylib that the module will meet on a Mac.

    uv run packages/flashattn-core/macos/download.py FOLDER mlx==0.32.4 mlx-metal==0.32.4

uv keeps what it has downloaded in its own cache, so that a second call needs no network.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

MINIMUM_MACOS = "14.0"


class DownloadError(Exception):
    """The wheels could not be had."""


def download(folder: Path, *requirements: str) -> None:
    """Unpacks the wheels into `folder`: those for macOS on arm64 and this Python's version."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise DownloadError("uv is missing: python3 -m pip install uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", f"--target={folder}"]
    command += ["--python-platform=aarch64-apple-darwin", f"--python={sys.executable}"]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": MINIMUM_MACOS}
    done = subprocess.run([*command, *requirements], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise DownloadError(f"{' '.join(requirements)} for macOS could not be had. uv says:\n{done.stderr.strip()}")


if __name__ == "__main__":
    try:
        download(Path(sys.argv[1]), *sys.argv[2:])
    except DownloadError as error:
        sys.exit(str(error))
