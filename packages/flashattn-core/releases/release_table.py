"""Reads releases.toml. CMake runs it to learn whether a release of MLX has what the CUDA kernels need.

    python releases/release_table.py 0.32.3

prints the oldest release that exports CUDA's encoder, and whether 0.32.3 exports it: `0.32.4 OFF`.
"""

import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

TABLE = Path(__file__).parents[1] / "releases.toml"


@dataclass(frozen=True)
class Release:
    mlx: str
    nanobind_abi: str
    nanobind: str
    cuda: bool
    ran_on: str = ""

    @property
    def has_stable_abi(self) -> bool:
        """Whether one module serves every CPython."""
        return numbers(self.nanobind) >= [3]


def numbers(version: str) -> list[int]:
    """The numbers of a version, for comparisons."""
    return [int(number) for number in version.split(".")]


def releases(table: Path = TABLE) -> list[Release]:
    """The rows of the table, oldest first."""
    read = tomllib.loads(table.read_text(encoding="utf-8"))
    rows = [Release(nanobind=read["nanobind"][row["nanobind_abi"]], **row) for row in read["release"]]
    return sorted(rows, key=lambda release: numbers(release.mlx))


def release(mlx: str, table: Path = TABLE) -> Release:
    """The row of this version of MLX. If there is none, raises LookupError, which names the known versions."""
    known = releases(table)
    for row in known:
        if row.mlx == mlx:
            return row
    raise LookupError(f"flashattn-core cannot be built for mlx {mlx}, only for {', '.join(row.mlx for row in known)}")


def to_build_for() -> Release:
    """The row of the installed MLX, or the newest row if no MLX is installed. Raises LookupError for an unknown MLX."""
    # Looks into the build environment, then into the environment of the Python that runs pip.
    for paths in (sys.path, [sysconfig.get_path("purelib")]):
        for found in distributions(name="mlx", path=paths):
            return release(found.version)
    return releases()[-1]


def build_requirements() -> list[str]:
    """The requirements of a build: MLX, for its headers and libmlx, and a nanobind with the same ABI as mlx.core's."""
    chosen = to_build_for()
    mlx = "mlx[cpu]" if sys.platform == "linux" else "mlx"
    return [f"{mlx}=={chosen.mlx}", f"nanobind=={chosen.nanobind}"]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        row = release(sys.argv[1])
    except LookupError as error:
        sys.exit(str(error))
    print(next(each.mlx for each in releases() if each.cuda), "ON" if row.cuda else "OFF")
