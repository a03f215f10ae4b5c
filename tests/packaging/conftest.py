"""Fixtures: the three wheels, and an environment that has them and nothing else of this project.

The variable PYTHONS lists the Python versions to test with, such as "3.11 3.13".
"""

import os
import sys

import pytest

from tests.packaging.build_wheels import PACKAGES
from tests.packaging.virtual_environment import Environment


@pytest.fixture(scope="session")
def wheels(wheel):
    return {distribution: wheel(distribution) for distribution in PACKAGES}


@pytest.fixture(scope="session", params=os.environ.get("PYTHONS", sys.executable).split(), ids=str)
def environment(request, wheels, tmp_path_factory):
    """An environment that has only the three wheels, installed by pip, and the packages that they require."""
    environment = Environment(tmp_path_factory.mktemp("clean"), request.param)
    environment.install_needed(wheels, extra="cpu")
    environment.install(wheels)
    return environment
