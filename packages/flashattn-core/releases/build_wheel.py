"""Builds flashattn-core's wheel with a module for each release of MLX in releases.toml, and prints the modules' sizes.

    python packages/flashattn-core/releases/build_wheel.py SOURCE OUTPUT [PYTHON ...]

SOURCE is the package's folder or its sdist. For some releases of MLX, a module fits only one CPython. Such a release
gets a module for each PYTHON, which is a version or an interpreter's path. The default is the interpreter that runs
this script. On Linux all modules share the library of kernels.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from release_table import Release, releases

WHEEL = ("run", "--no-project", "--with", "wheel==0.48.0", "wheel")


def run(*command: object) -> None:
    with tempfile.TemporaryDirectory() as nowhere:  # a folder in which uv finds no workspace
        done = subprocess.run(list(map(str, command)), cwd=nowhere, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def uv(*arguments: object) -> None:
    program = os.environ.get("UV") or shutil.which("uv")
    if program is None:
        raise FileNotFoundError("uv is missing: python3 -m pip install uv")
    run(program, *arguments)


def source_folder(source: Path, work: Path) -> Path:
    """Returns the package's folder. If `source` is an sdist, unpacks it first."""
    if source.is_dir():
        return source
    with tarfile.open(source) as archive:
        archive.extractall(work / "source", filter="data")
    [folder] = (work / "source").iterdir()
    return folder


def add_module(release: Release, python: str, source: Path, wheel: Path, work: Path) -> None:
    """Builds the module for one release and one Python, and installs it into the unpacked wheel."""
    environment, build = work / "environment", work / "build"
    uv("venv", "--quiet", "--clear", "--no-project", "--python", python, environment)
    mlx = "mlx[cpu]" if sys.platform == "linux" else "mlx"
    needed = (f"{mlx}=={release.mlx}", f"nanobind=={release.nanobind}", "cmake>=3.27,<5", "ninja>=1.11,<2")
    uv("pip", "install", "--quiet", "--python", environment, *needed)
    programs = environment / "bin"
    shutil.rmtree(build, ignore_errors=True)
    options = [f"-DPython_EXECUTABLE={programs / 'python'}", f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"]
    options += ["-DCMAKE_BUILD_TYPE=Release", f"-DSKBUILD_PROJECT_VERSION={wheel.name.split('-')[1]}"]
    for library in wheel.glob("flashattn_core/libflashattn_kernels.*"):
        options.append(f"-DFLASHATTN_KERNELS={library}")
    run(programs / "cmake", "-S", source, "-B", build, "-G", "Ninja", *options)
    run(programs / "cmake", "--build", build)
    run(programs / "cmake", "--install", build, "--prefix", wheel, "--strip")


def build_wheel(source: Path, output: Path, pythons: list[str]) -> Path:
    """Builds the wheel for the newest release, then adds the older releases' modules. Returns the wheel's path."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = source_folder(source, work)
        uv("build", "--quiet", "--wheel", "--python", sys.executable, "--out-dir", work / "newest", folder)
        [newest] = (work / "newest").glob("*.whl")
        unpacked = work / newest.stem
        with zipfile.ZipFile(newest) as archive:
            archive.extractall(unpacked)
        for release in releases(folder / "releases.toml")[:-1]:
            for python in [sys.executable] if release.has_stable_abi else pythons:
                add_module(release, python, folder, unpacked, work)
        uv(*WHEEL, "pack", unpacked, "--dest-dir", output)
        return output / newest.name


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    source, output = (Path(argument).resolve() for argument in sys.argv[1:3])
    output.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(source, output, sys.argv[3:] or [sys.executable])
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".so"):
                print(f"{member.file_size / 1e6:6.2f} MB, {member.compress_size / 1e6:.2f} packed: {member.filename}")
    print(f"{wheel.stat().st_size / 1e6:6.2f} MB: {wheel}")
