"""Follows a release of MLX: finds out whether flashattn-core works with it, and if so adds it to releases.toml.

    make follow MLX=0.32.5      # in a clone of the repository; downloads 1 GB, and takes half an hour on two cores
    make newer                  # fails if the index has a newer release than the table

Stops at the first problem, and then undoes its changes of the repository. Problems are: MLX's nanobind is unknown, the
module does not compile, a libmlx lacks a symbol, or a test fails. Prints the changes of MLX's own attention.
"""

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from release_table import TABLE, Release, numbers, releases

PACKAGE = TABLE.parent
ROOT = PACKAGE.parents[1]
MACOS = PACKAGE / "macos"
LIBMLX_ON_LINUX = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
MACOS_VERSIONS = ("14.0", "15.0", "26.0")  # MLX publishes a libmlx for each of these
ENCODER = "_ZN3mlx4core2cu19get_command_encoderENS0_6StreamE"
# These files contain MLX's version.
NAMING = (
    "pyproject.toml",
    "packages/flashattn-core/pyproject.toml",
    "examples/README.md",
    "docs/support.md",
)
SUITES = ("tests/core", "tests/patch")

# Prints the nanobind ABI of mlx.core. A key in the interpreter's dict contains it.
ABI = """
import ctypes, re, mlx.core
api = ctypes.pythonapi
api.PyInterpreterState_Get.restype = api.PyInterpreterState_GetDict.restype = ctypes.c_void_p
api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
shared = ctypes.cast(api.PyInterpreterState_GetDict(api.PyInterpreterState_Get()), ctypes.py_object).value
print(*{found[1] for name in shared if (found := re.search(r"nb_internals_.*?(v\\d+)_(?:\\w+_)?mlx__$", str(name)))})
"""
SIGNATURE = "import mlx.core as mx; print(mx.fast.scaled_dot_product_attention.__doc__)"


class Stop(Exception):
    """This release of MLX cannot be added to releases.toml. The text says why."""


def run(*command: object, **variables: str) -> str:
    """Returns the command's output. If the command fails, raises Stop with its output."""
    hidden = {"VIRTUAL_ENV", "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=ROOT, env={**environment, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise Stop(f"{' '.join(words)} fails:\n{done.stdout}")
    return done.stdout


def uv(*arguments: object, **variables: str) -> str:
    return run(os.environ.get("UV") or shutil.which("uv") or "uv", *arguments, **variables)


def newest_on_the_index() -> str:
    with_pin = subprocess.run(
        [os.environ.get("UV") or "uv", "pip", "compile", "--quiet", "--no-deps", "--no-header", "--upgrade", "-"],
        input="mlx",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return re.findall(r"^mlx==([\d.]+)", with_pin, re.MULTILINE)[0]


def fetch(mlx: str, work: Path) -> None:
    """Makes an environment with MLX for this CPU, and unpacks the other builds of libmlx."""
    uv("venv", "--quiet", "--clear", "--no-project", "--python", sys.executable, work / "plain")
    uv("pip", "install", "--quiet", "--python", work / "plain", f"mlx[cpu]=={mlx}")
    for name in LIBMLX_ON_LINUX:
        uv("pip", "install", "--quiet", "--no-deps", f"--target={work / name}", f"{name}=={mlx}")
    for macos in MACOS_VERSIONS:
        wanted = (f"mlx=={mlx}", f"mlx-metal=={mlx}")
        uv("run", "--quiet", MACOS / "download.py", work / f"macos-{macos}", *wanted, "--macos", macos)


def nanobind_abi(mlx: str, work: Path) -> str:
    """The version of mlx.core's nanobind ABI. Raises Stop if releases.toml does not have this version."""
    found = run(work / "plain/bin/python", "-c", ABI).strip()
    known = re.findall(r"^(v\d+) = ", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    if found not in known:
        raise Stop(
            f"mlx {mlx} has nanobind's ABI {found}, and releases.toml knows {', '.join(known)}: find the nanobind "
            "whose sources have that NB_INTERNALS_VERSION, and add it to [nanobind]"
        )
    return found


def symbols(library: Path, *options: str) -> dict[str, str]:
    """Maps each of MLX's symbols in the library's dynamic symbol table to the letter that nm prints for it."""
    rows = re.findall(r"(\w) (_Z\S*3mlx\S+)", run("nm", "--dynamic", *options, library))
    return {name: letter for letter, name in rows}


def exported(work: Path) -> dict[str, set[str]]:
    """Maps the name of each build of libmlx for Linux to the build's symbols."""
    return {name: set(symbols(work / name / "mlx/lib/libmlx.so", "--defined-only")) for name in LIBMLX_ON_LINUX}


def compare_symbols(module: Path, libraries: dict[str, set[str]]) -> str:
    """Raises Stop if a build of libmlx lacks a symbol that the module needs.

    CUDA's symbols are weak in the module, because only builds of libmlx for CUDA have them.
    """
    wanted = symbols(module, "--undefined-only")
    weak = {name for name, letter in wanted.items() if letter in "wv"}
    for library, has in libraries.items():
        missing = (wanted.keys() if "cuda" in library else wanted.keys() - weak) - has
        if missing:
            raise Stop(f"the libmlx of {library} lacks " + ", ".join(sorted(missing)))
    return f"{len(wanted)} symbols, {len(weak)} of them CUDA's, are in {', '.join(libraries)}"


def write(added: Release, before: Release) -> None:
    """Adds the release to the table, and replaces the older version in the files that NAMING lists."""
    row = (
        f'\n[[release]]\nmlx = "{added.mlx}"\nnanobind_abi = "{added.nanobind_abi}"\ncuda = {str(added.cuda).lower()}\n'
    )
    TABLE.write_text(TABLE.read_text(encoding="utf-8") + row, encoding="utf-8")
    for file in NAMING:
        text = (ROOT / file).read_text(encoding="utf-8")
        text = re.sub(rf"([<=]=){re.escape(before.mlx)}\b", rf"\g<1>{added.mlx}", text)
        (ROOT / file).write_text(with_matrix(text), encoding="utf-8")


def matrix() -> str:
    """The table of docs/support.md."""
    lines = ["| mlx | CPython | Linux, CPU | CUDA | macOS |", "|---|---|---|---|---|"]
    for row in releases():
        pythons = "3.11 and newer" if row.has_stable_abi else "3.11, 3.12, 3.13"
        with_encoder = f"run on an {row.ran_on}" if row.ran_on else "built, not run"
        cuda = with_encoder if row.cuda else "no: MLX does not export its encoder"
        lines.append(f"| {row.mlx} | {pythons} | run | {cuda} | built |")
    return "\n".join(lines) + "\n"


def with_matrix(page: str) -> str:
    return re.sub(r"^\| mlx \| CPython .*?\n(?=\n)", lambda _: matrix(), page, flags=re.MULTILINE | re.DOTALL)


def build_for_linux(mlx: str, work: Path) -> Path:
    """Builds the workspace for this release, in its own environment. Returns the module."""
    environment = {"UV_PROJECT_ENVIRONMENT": str(work / "environment")}
    uv("sync", "--quiet", "--upgrade-package", "mlx", "--upgrade-package", "mlx-cpu", **environment)
    folder = f"lib/python*/site-packages/flashattn_core/_mlx_{mlx.replace('.', '_')}"
    found = [*(work / "environment").glob(f"{folder}/_ext.*")]
    if not found:
        raise Stop(f"uv sync built no module for mlx {mlx}")
    return found[0]


def build_for_macos(mlx: str, work: Path) -> str:
    """Builds the wheel for macOS, and checks it with MLX's build for each macOS version. Returns the result."""
    output = work / "macos-wheel"
    uv("run", "--quiet", MACOS / "build.py", "--output", output, "--mlx", mlx)
    [wheel] = output.glob("*.whl")
    for macos in MACOS_VERSIONS:
        uv("run", "--quiet", MACOS / "check.py", wheel, "--mlx", work / f"macos-{macos}/mlx")
    return f"nothing wrong beside libmlx.dylib for macOS {', '.join(MACOS_VERSIONS)}"


def attention_of(python: Path, metal: Path) -> list[str]:
    """Describes MLX's own attention: its documentation, and the names of its functions in the Metal library."""
    library = (metal / "mlx/lib/mlx.metallib").read_bytes()
    kernels = set(re.findall(rb"(?:steel_attention|sdpa_vector)_[a-z0-9_]+?(?=llvm|[^a-z0-9_])", library))
    return [*run(python, "-c", SIGNATURE).splitlines(), *sorted(name.decode() for name in kernels)]


def compare_attention(before: Release, mlx: str, work: Path) -> str:
    """Returns the changes of MLX's own attention since the release `before`. The changes may change timings, but they
    break nothing, but csrc/call/mlx_fused.h may have to follow."""
    old = work / "before"
    uv("venv", "--quiet", "--clear", "--no-project", "--python", sys.executable, old / "plain")
    uv("pip", "install", "--quiet", "--python", old / "plain", f"mlx[cpu]=={before.mlx}")
    uv("run", "--quiet", MACOS / "download.py", old / "macos", f"mlx=={before.mlx}", f"mlx-metal=={before.mlx}")
    then = attention_of(old / "plain/bin/python", old / "macos")
    now = attention_of(work / "plain/bin/python", work / f"macos-{MACOS_VERSIONS[0]}")
    changes = [*difflib.unified_diff(then, now, before.mlx, mlx, lineterm="", n=0)]
    return "\n".join(changes) or f"its arguments and kernels are those of {before.mlx}"


def run_tests(work: Path) -> str:
    python = work / "environment/bin/python"
    *_, last = run(python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *SUITES).strip().splitlines()
    return last


def follow(mlx: str, work: Path) -> None:
    before = releases()[-1]
    if numbers(mlx) <= numbers(before.mlx):
        raise Stop(f"releases.toml has mlx {before.mlx}, so {mlx} is not new")
    texts = {ROOT / file: (ROOT / file).read_text(encoding="utf-8") for file in NAMING}
    texts[TABLE] = TABLE.read_text(encoding="utf-8")
    try:
        step("fetched", fetch, mlx, work)
        abi = step("nanobind's ABI", nanobind_abi, mlx, work)
        libraries = exported(work)
        has_cuda = all(ENCODER in has for name, has in libraries.items() if "cuda" in name)
        print(f"CUDA's encoder is {'' if has_cuda else 'not '}exported", flush=True)
        write(Release(mlx, abi, "", has_cuda), before)
        module = step("built for Linux", build_for_linux, mlx, work)
        step("compared", compare_symbols, module, libraries)
        step("built for macOS", build_for_macos, mlx, work)
        step("MLX's own attention", compare_attention, before, mlx, work)
        step("tested", run_tests, work)
    except BaseException:
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
        raise


def step(name, function, *arguments):
    """Runs one step, and prints what it found and how long it took."""
    began = time.monotonic()
    found = function(*arguments)
    print(f"{name}, {time.monotonic() - began:.0f} s" + (f": {found}" if found else ""), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mlx", nargs="?", help="the release to follow")
    parser.add_argument("--newer", action="store_true", help="only look for a newer release on the index")
    arguments = parser.parse_args()
    if arguments.newer:
        newest, known = newest_on_the_index(), releases()[-1].mlx
        print(f"the index has mlx {newest}, releases.toml {known}")
        if numbers(newest) > numbers(known):
            sys.exit(f"make follow MLX={newest}")
        return
    if not arguments.mlx:
        parser.error("which release? make follow MLX=0.32.5")
    work = ROOT / "build/follow" / arguments.mlx
    began = time.monotonic()
    try:
        follow(arguments.mlx, work)
    except Stop as stop:
        sys.exit(f"mlx {arguments.mlx} is not followed: {stop}")
    print(f"mlx {arguments.mlx} is in releases.toml after {(time.monotonic() - began) / 60:.0f} minutes: commit it")


if __name__ == "__main__":
    main()
