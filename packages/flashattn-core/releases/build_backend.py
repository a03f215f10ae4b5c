"""scikit-build-core, told which MLX to build for: the one that is installed, or else the newest of releases.toml.

A module runs beside one release of MLX alone. So the build environment needs that release and its nanobind, which no
line of pyproject.toml can say.
"""

import sys
import sysconfig
from importlib.metadata import distributions
from typing import Any

from release_table import Release, release, releases
from scikit_build_core import build as scikit_build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any] | None


def wanted() -> Release:
    """The release to build for. pip runs this with the Python that the package will be installed for."""
    for paths in (sys.path, [sysconfig.get_path("purelib")]):  # the build environment's, the installing Python's
        for found in distributions(name="mlx", path=paths):
            return release(found.version)
    return releases()[-1]


def build_requirements() -> list[str]:
    chosen = wanted()
    mlx = "mlx[cpu]" if sys.platform == "linux" else "mlx"  # its headers and a libmlx to link to
    return [f"{mlx}=={chosen.mlx}", f"nanobind=={chosen.nanobind}"]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*scikit_build.get_requires_for_build_wheel(config_settings), *build_requirements()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*scikit_build.get_requires_for_build_editable(config_settings), *build_requirements()]


def tagged(config_settings: Settings) -> dict[str, Any]:
    """The wheel is for every CPython from 3.11 on, or for this one alone."""
    return {"wheel.py-api": "cp311" if wanted().has_stable_abi else "", **(config_settings or {})}


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return str(scikit_build.build_wheel(wheel_directory, tagged(config_settings), metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return str(scikit_build.build_editable(wheel_directory, tagged(config_settings), metadata_directory))
