"""Caches what tests compile. Each build has a folder, named by a hash of everything that goes into the build.

Processes that want the same build wait for the process that makes it. Builds that nobody used for a month are removed.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashattn-tests"
MONTH = 30 * 24 * 3600


def contents(*folders: Path, patterns: Iterable[str] = ("**/*",)) -> bytes:
    """Returns the names and bytes of all files in the folders, for the `key` of built()."""
    files = sorted({file for folder in folders for pattern in patterns for file in folder.glob(pattern)})
    return b"".join(str(file.name).encode() + file.read_bytes() for file in files if file.is_file())


def built(make: Callable[[Path], None], *key: str | bytes) -> Path:
    """Returns the folder that make(folder) filled for this key, now or earlier. A failed build leaves no folder."""
    digest = hashlib.sha256()
    for part in key:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    folder = CACHE / digest.hexdigest()[:32]
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _remove_old()
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        os.utime(folder)
    return folder


def _remove_old() -> None:
    for folder in CACHE.iterdir():
        if folder.is_dir() and folder.stat().st_mtime < time.time() - MONTH:
            shutil.rmtree(folder, ignore_errors=True)
