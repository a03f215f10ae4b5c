"""Breaks one promise after the other, and runs the test that must notice: `python tests/mutations [WORD ...]`.

The files in promises hold for each promise of docs/reliability.md a change of a line or two by which it no longer
holds. The last commit is cloned into a folder of its own, built there, and must pass all the tests named; then one
change at a time is made, built where it is C++, tested, and taken back. WORDs take the rows whose words, file or test
contain one of them. Needs git and uv, and an hour or two for all. Exit code 1 if a test does not notice.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from promises import evaluation, gradients, masks, memory, metal, packaging, patch, process, results
from promises.mutation import Mutation

GROUPS = [results, masks, gradients, memory, process, patch, evaluation, packaging, metal]
MUTATIONS = [mutation for group in GROUPS for mutation in group.MUTATIONS]
ROOT = Path(__file__).parents[2]
PYTHON = ".venv/bin/python"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def must(folder: Path, *command: str) -> str:
    done = run(folder, *command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} fails:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def set_up(folder: Path) -> None:
    """A clone with an environment of its own, and a build that compiles no more than what a mutation changes."""
    must(ROOT, "git", "clone", "-q", str(ROOT), str(folder))
    must(folder, "uv", "sync", "-q")
    version = must(folder, PYTHON, "-c", "import flashattn_core; print(flashattn_core.__version__)")
    options = [f"-DPython_EXECUTABLE={folder / PYTHON}", f"-DSKBUILD_PROJECT_VERSION={version}"]
    cmake(folder, "-S", "packages/flashattn-core", "-B", "build/core", "-G", "Ninja", *options)
    build(folder)


def build(folder: Path) -> None:
    site_packages = must(folder, PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))")
    cmake(folder, "--build", "build/core")
    cmake(folder, "--install", "build/core", "--prefix", site_packages)


def cmake(folder: Path, *arguments: str) -> None:
    must(folder, "uv", "run", "--no-sync", "cmake", *arguments)  # in sync, uv would build all of the package before


def failing(folder: Path, *tests: str) -> str:
    """The first failing test's line, or an empty string. Whatever else pytest complains of ends the program."""
    files = [f"tests/{test}" for test in tests]
    done = run(folder, PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
    if done.returncode != bool(line):
        raise SystemExit(f"pytest does not run:\n{done.stdout}{done.stderr}")
    return line


def noticed(folder: Path, mutation: Mutation) -> str:
    file = folder / mutation.file
    text = file.read_text()
    try:
        file.write_text(text.replace(mutation.old, mutation.new))
        if mutation.is_compiled:
            build(folder)
        return failing(folder, mutation.test)
    finally:
        file.write_text(text)


def main(*words: str) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in f"{m.broken} {m.file} {m.test}" for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "clone")
        set_up(folder)
        if line := failing(folder, *dict.fromkeys(mutation.test for mutation in chosen)):
            raise SystemExit(f"fails with nothing broken: {line}")
        # What is compiled comes last: the build is then that of no other.
        for number, mutation in enumerate(sorted(chosen, key=lambda m: m.is_compiled), 1):
            line = noticed(folder, mutation)
            missed += not line
            verdict = "noticed" if line else "MISSED "
            print(f"{number}/{len(chosen)}  {verdict}  {mutation.broken}  {line or mutation.test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
