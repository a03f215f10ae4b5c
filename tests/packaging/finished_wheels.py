"""Fixtures for the sdists and wheels, which are built when a test first needs them.

If the variable WHEELS names a folder, its files are used instead.
"""

import os
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.builds import built
from tests.packaging.build_wheels import build_sdist, build_wheel

FINISHED = os.environ.get("WHEELS")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """sdist(distribution): the path of a distribution's sdist."""
    folder = Path(FINISHED).resolve() if FINISHED else tmp_path_factory.mktemp("sdists")

    @cache
    def sdist(distribution):
        if FINISHED:
            return next(folder.glob(f"{distribution.replace('-', '_')}-*.tar.gz"))
        return build_sdist(distribution, folder)

    return sdist


@pytest.fixture(scope="session")
def wheel(sdist):
    """wheel(distribution): the path of a distribution's wheel, built from its sdist."""

    def wheel(distribution):
        source = sdist(distribution)
        folder = source.parent
        if not FINISHED:
            folder = built(lambda folder: build_wheel(source, folder), "wheel", sys.version, source.read_bytes())
        return next(folder.glob(f"{distribution.replace('-', '_')}-*.whl"))

    return wheel
