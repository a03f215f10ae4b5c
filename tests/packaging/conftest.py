"""The sdists and wheels, built when a test first asks for one, and a clean environment that holds nothing of this
project but the wheels.

WHEELS names a folder of finished ones to use instead, PYTHONS the Python versions to try them with:
"3.11 3.13".
"""

import os
import sys
from functools import cache
from pathlib import Path

import pytest
from build_wheels import PACKAGES, build_sdist, build_wheel
from builds import built
from virtual_environment import Environment

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


@pytest.fixture(scope="session")
def wheels(wheel):
    return {distribution: wheel(distribution) for distribution in PACKAGES}


@pytest.fixture(scope="session", params=os.environ.get("PYTHONS", sys.executable).split(), ids=str)
def environment(request, wheels, tmp_path_factory):
    """The three wheels, installed by pip, with what they say that they need and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("clean"), request.param)
    environment.install_needed(wheels, extra="cpu")
    environment.install(wheels)
    return environment
