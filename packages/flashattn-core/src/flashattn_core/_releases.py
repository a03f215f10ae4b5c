"""Finds the extension module for the installed MLX. Each MLX release needs its own, because libmlx's ABI changes."""

import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_THIS_PYTHON = f"CPython {sys.version_info.major}.{sys.version_info.minor}"


def module_folder(mlx: str, package: Iterable[str]) -> Path:
    """The folder of the module for MLX version `mlx`. If there is none, raises ImportError with the known versions.

    package: the folders of flashattn_core. An editable install has two of them.
    """
    folders = _folders(package)
    if not folders:
        raise ImportError(
            f"flashattn_core has no extension module for {_THIS_PYTHON}: reinstall it with that Python's pip"
        )
    if mlx not in folders:
        raise ImportError(
            f"flashattn_core was built for mlx {', '.join(folders)}, but found mlx {mlx}. "
            f"Install a matching mlx: {install_command(package)}"
        )
    return folders[mlx]


def install_command(package: Iterable[str]) -> str:
    """The pip command that installs the newest supported MLX."""
    folders = list(_folders(package))
    if not folders:
        return f"reinstall flashattn-core with {_THIS_PYTHON}"
    newest = folders[-1]
    if sys.platform == "linux":  # there, mlx without an extra does not install libmlx
        return f"pip install 'mlx[cpu]=={newest}', or [cuda12] or [cuda13] for an NVIDIA GPU"
    return f"pip install 'mlx=={newest}'"


def _folders(package: Iterable[str]) -> dict[str, Path]:
    """Maps MLX versions to folders, the oldest first. Leaves out folders without a module for this Python."""
    found = {
        folder.name.removeprefix("_mlx_").replace("_", "."): folder
        for place in package
        for folder in Path(place).glob("_mlx_*")
        if any((folder / f"_ext{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
    }
    return dict(sorted(found.items(), key=lambda item: [int(number) for number in item[0].split(".")]))
