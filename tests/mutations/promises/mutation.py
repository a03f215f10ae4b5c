"""A mutation: a change of a line or two that breaks a promise, and the test that must notice."""

from dataclasses import dataclass
from pathlib import Path

CORE = "packages/flashattn-core/src/flashattn_core"
CPP = "packages/flashattn-core/csrc"
PATCH = "packages/mlxlm-flash-patch/src/mlxlm_flash_patch"
EVALS = "packages/evals/src/flash_evals"


@dataclass(frozen=True)
class Mutation:
    broken: str  # how the promise is broken, in words
    file: str
    old: str  # occurs once in the file
    new: str
    test: str  # a test of the promise in docs/dev/reliability.md: pytest's name for it, below tests/
    nightly: str = ""  # if only nightly tests notice: the reason

    @property
    def function(self) -> str:
        """The test's function, without a case of it."""
        return self.test.partition("[")[0]

    @property
    def option(self) -> tuple[str, ...]:
        """pytest's option to run the test that notices."""
        return ("--all",) if self.nightly else ()

    @property
    def is_compiled(self) -> bool:
        return Path(self.file).suffix in (".h", ".cpp", ".metal") and self.file.startswith(CPP)
