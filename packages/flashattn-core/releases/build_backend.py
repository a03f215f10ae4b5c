"""Builds for the installed MLX with scikit-build-core. If no MLX is installed, builds for the newest of releases.toml.

A module works with only one release of MLX. So the build needs that release and its nanobind. pyproject.toml cannot
choose them, because it lists the same requirements for every build.
"""

from typing import Any

from release_table import build_requirements, to_build_for
from scikit_build_core import build as scikit_build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

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


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*scikit_build.get_requires_for_build_wheel(config_settings), *build_requirements()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*scikit_build.get_requires_for_build_editable(config_settings), *build_requirements()]


def tagged(config_settings: Settings) -> dict[str, Any]:
    """Adds the wheel's Python tag to the settings: cp311 if the module works in CPython 3.11 and all later ones.
    Otherwise the tag is that of the CPython that runs this."""
    return {"wheel.py-api": "cp311" if to_build_for().has_stable_abi else "", **(config_settings or {})}


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return str(scikit_build.prepare_metadata_for_build_wheel(metadata_directory, tagged(config_settings)))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    return str(scikit_build.prepare_metadata_for_build_editable(metadata_directory, tagged(config_settings)))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return str(scikit_build.build_wheel(wheel_directory, tagged(config_settings), metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return str(scikit_build.build_editable(wheel_directory, tagged(config_settings), metadata_directory))
