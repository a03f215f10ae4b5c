"""One change of a line or two by which a promise no longer holds, and the test that must notice."""

from dataclasses import dataclass
from pathlib import Path

CORE = "packages/flashattn-core/src/flashattn_core"
CPP = "packages/flashattn-core/csrc"
PATCH = "packages/mlxlm-flash-patch/src/mlxlm_flash_patch"
EVALS = "packages/evals/src/flash_evals"


@dataclass(frozen=True)
class Mutation:
    broken: str  # what no longer holds, in words
    file: str
    old: str  # occurs once
    new: str
    test: str  # in tests/, as pytest names it; one of those beside the promise in docs/dev/reliability.md
    nightly: str = ""  # the reason why only nightly tests notice, if so

    @property
    def option(self) -> tuple[str, ...]:
        """pytest's option to run the test that notices."""
        return ("--all",) if self.nightly else ()

    @property
    def is_compiled(self) -> bool:
        return Path(self.file).suffix in (".h", ".cpp", ".metal") and self.file.startswith(CPP)
