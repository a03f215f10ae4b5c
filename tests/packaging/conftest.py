"""The sdists and wheels, built once by each process of tests, and a clean environment that holds nothing of this
project but the wheels.

WHEELS names a folder of finished ones to use instead, PYTHONS the Python versions to try them with:
"3.11 3.13".
"""

import os
import sys
from pathlib import Path

import pytest
from build_wheels import PACKAGES, build
from virtual_environment import Environment


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A folder with three sdists and three wheels."""
    if finished := os.environ.get("WHEELS"):
        return Path(finished).resolve()
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


@pytest.fixture(scope="session")
def wheels(built):
    """The wheel of each distribution."""
    return {name: next(built.glob(f"{name.replace('-', '_')}-*.whl")) for name in PACKAGES}


@pytest.fixture(scope="session", params=os.environ.get("PYTHONS", sys.executable).split(), ids=str)
def environment(request, wheels, tmp_path_factory):
    """The three wheels, installed by pip, with what they say that they need and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("clean"), request.param)
    environment.install_needed(wheels)
    environment.install(wheels)
    return environment
