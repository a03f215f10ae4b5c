"""Each module lists mutations, which break the promises of one group in docs/dev/reliability.md."""

from dataclasses import dataclass
from pathlib import Path

CORE = "packages/flashattn-core/src/flashattn_core"
CPP = "packages/flashattn-core/csrc"
PATCH = "packages/mlxlm-flash-patch/src/mlxlm_flash_patch"
EVALS = "packages/evals/src/flash_evals"


@dataclass(frozen=True)
class Mutation:
    """A change of a line or two that breaks a promise, and the test that must fail then."""

    broken: str  # how the changed program breaks the promise, in words
    file: str
    old: str  # the text to replace; it occurs once in the file
    new: str
    test: str  # one of the promise's tests, such as "core/test_grid.py::test_grid", or a case of it
    nightly: str = ""  # why only `make nightly` runs the test; empty if other runs do

    @property
    def function(self) -> str:
        """`test` without the case."""
        return self.test.partition("[")[0]

    @property
    def option(self) -> tuple[str, ...]:
        """The option of pytest that the test needs."""
        return ("--all",) if self.nightly else ()

    @property
    def is_compiled(self) -> bool:
        return Path(self.file).suffix in (".h", ".cpp", ".metal") and self.file.startswith(CPP)
