"""Fixtures for sdists and wheels. An sdist or a wheel is built when a test first needs it.

If the variable WHEELS names a folder, tests use the sdists and wheels in that folder instead.
"""

import os
import sys
from functools import cache, partial
from pathlib import Path

import pytest

from tests.builds import built
from tests.packaging.build_wheels import build_sdist, build_wheel

FINISHED = os.environ.get("WHEELS")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """sdist(distribution): the path of the sdist."""
    folder = Path(FINISHED).resolve() if FINISHED else tmp_path_factory.mktemp("sdists")

    @cache
    def sdist(distribution):
        if FINISHED:
            return next(folder.glob(f"{distribution.replace('-', '_')}-*.tar.gz"))
        return build_sdist(distribution, folder)

    return sdist


@pytest.fixture(scope="session")
def wheel(sdist):
    """wheel(distribution): the path of the wheel, built from its sdist.

    With the path of a Python as second argument, flashattn-core's wheel is for all releases of MLX.
    """

    def wheel(distribution, *pythons):
        source = sdist(distribution)
        folder = source.parent
        if not FINISHED:
            make = partial(build_wheel, source, pythons=pythons)
            folder = built(make, "wheel", *pythons, sys.version, source.read_bytes())
        return next(folder.glob(f"{distribution.replace('-', '_')}-*.whl"))

    return wheel
