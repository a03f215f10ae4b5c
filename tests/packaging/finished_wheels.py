"""The sdists and wheels, built when a test first asks for one.

WHEELS names a folder of finished ones to use instead.
"""

import os
import sys
from functools import cache
from pathlib import Path

import pytest
from build_wheels import build_sdist, build_wheel
from builds import built

FINISHED = os.environ.get("WHEELS")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """A function: the sdist of a distribution."""
    folder = Path(FINISHED).resolve() if FINISHED else tmp_path_factory.mktemp("sdists")

    @cache
    def sdist(distribution):
        if FINISHED:
            return next(folder.glob(f"{distribution.replace('-', '_')}-*.tar.gz"))
        return build_sdist(distribution, folder)

    return sdist


@pytest.fixture(scope="session")
def wheel(sdist):
    """A function: the wheel of a distribution, built from its sdist."""

    def wheel(distribution):
        source = sdist(distribution)
        folder = source.parent
        if not FINISHED:
            folder = built(lambda folder: build_wheel(source, folder), "wheel", sys.version, source.read_bytes())
        return next(folder.glob(f"{distribution.replace('-', '_')}-*.whl"))

    return wheel
