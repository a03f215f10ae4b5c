"""Breaks one promise after the other, and runs the test that must notice: `python tests/mutations [WORD ...]`.

For each promise of docs/dev/reliability.md, promises/ has a mutation: a change of a line or two that breaks the
promise. This program clones the last commit twice and builds both clones. The tests of all mutations must pass in the
first clone. Then, for one mutation at a time, a clone makes the change, is built again if the change is in C++, runs
the mutation's test and undoes the change.

A WORD selects a group, such as results, or mutations whose description, file or test contains the WORD. The program
needs git and uv; ccache, if installed, saves time. The exit code is 1 if a test passes although its promise is broken.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from queue import SimpleQueue

import promises
from promises import Mutation

GROUPS: dict[str, list[Mutation]] = {
    group.name: import_module(f"promises.{group.name}").MUTATIONS for group in iter_modules(promises.__path__)
}
MUTATIONS = [mutation for mutations in GROUPS.values() for mutation in mutations]
ROOT = Path(__file__).parents[2]
PYTHON = ".venv/bin/python"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if shutil.which("ccache"):
        environment |= {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_NOHASHDIR": "1", "CCACHE_BASEDIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def must(folder: Path, *command: str) -> str:
    done = run(folder, *command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} fails:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def set_up(folder: Path) -> None:
    """Makes a clone with its own environment, and builds the extension for this machine's instruction set alone."""
    must(ROOT, "git", "clone", "-q", str(ROOT), str(folder))
    must(folder, "uv", "sync", "-q", "--all-groups")
    version = must(folder, PYTHON, "-c", "import flashattn_core; print(flashattn_core.__version__)")
    taken = must(folder, PYTHON, "-c", "import flashattn_core; print(flashattn_core.backends()['cpu'].split(',')[0])")
    options = [
        f"-DPython_EXECUTABLE={folder / PYTHON}",
        f"-DSKBUILD_PROJECT_VERSION={version}",
        f"-DFLASHATTN_INSTRUCTION_SETS={taken.replace('-', '').lower()}",
        *("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1"),  # compiles twice as fast
    ]
    cmake(folder, "-S", "packages/flashattn-core", "-B", "build/core", "-G", "Ninja", *options)
    build(folder)


def build(folder: Path) -> None:
    site_packages = must(folder, PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))")
    cmake(folder, "--build", "build/core")
    cmake(folder, "--install", "build/core", "--prefix", site_packages)


def cmake(folder: Path, *arguments: str) -> None:
    must(folder, "uv", "run", "--no-sync", "cmake", *arguments)  # with a sync, uv would first build the whole package


def failing(folder: Path, *arguments: str) -> str:
    """Returns pytest's line about the first failing test, else its exit code. Returns "" if all tests pass."""
    done = run(folder, PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments)
    lines = (line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    return next(lines, f"pytest exits with {done.returncode}" if done.returncode else "")


def noticed(folder: Path, mutation: Mutation) -> str:
    file = folder / mutation.file
    text = file.read_text()
    try:
        file.write_text(text.replace(mutation.old, mutation.new))
        if mutation.is_compiled:
            build(folder)
        return failing(folder, f"tests/{mutation.test}", *mutation.option)
    finally:
        file.write_text(text)


def takes(words: tuple[str, ...], group: str, mutation: Mutation) -> bool:
    text = f"{mutation.broken} {mutation.file} {mutation.test}"
    return not words or any(word == group if word in GROUPS else word in text for word in words)


def main(*words: str) -> int:
    chosen = [m for group, mutations in GROUPS.items() for m in mutations if takes(words, group, m)]
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        free: SimpleQueue[Path] = SimpleQueue()
        for name in ("one", "other"):
            set_up(Path(temporary, name))
            free.put(Path(temporary, name))
        for option in sorted({mutation.option for mutation in chosen}):
            tests = dict.fromkeys(f"tests/{mutation.test}" for mutation in chosen if mutation.option == option)
            must(Path(temporary, "one"), PYTHON, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *tests, *option)

        def result(mutation: Mutation) -> str:
            folder = free.get()
            try:
                return noticed(folder, mutation)
            finally:
                free.put(folder)

        # Mutations of C++ come last, because the clone keeps the broken extension until the next build.
        chosen.sort(key=lambda mutation: (mutation.is_compiled, mutation.file))
        with ThreadPoolExecutor(2) as pool:
            for number, (mutation, line) in enumerate(zip(chosen, pool.map(result, chosen), strict=True), 1):
                missed += not line
                verdict = "noticed" if line else "MISSED "
                print(f"{number}/{len(chosen)}  {verdict}  {mutation.broken}  {line or mutation.test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
