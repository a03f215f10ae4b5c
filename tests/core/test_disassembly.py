"""The kernels of each instruction set multiply whole registers. Without the flags of their set they would be slow."""

import re
from pathlib import Path

import pytest

from tests.core.programs import ARM, require, run, sets_here

# Two patterns for each set. The first finds multiply-adds on whole registers, or multiplications if the set has no
# multiply-add. The second finds instructions that make kernels slow: the same instructions on smaller registers, and
# multiplications that a multiply-add could replace.
MULTIPLY_ADD = {
    "avx512": (r"\tvfmadd\w+ps .*%zmm", r"\tvfmadd\w+(ss|ps) .*%[xy]mm|\tvmulps"),
    "avx2": (r"\tvfmadd\w+ps .*%ymm", r"\tvfmadd\w+(ss|ps) .*%xmm|\tvmulps"),
    "baseline": (r"\tmulps .*%xmm", r"\tmulss"),
    "neon": (r"\tfmla\tv\d+\.4s", r"\tfmadd|\tfmul\tv\d+\.4s"),
}


def count(pattern: str, object_file: Path, tool: str = "objdump") -> int:
    require(tool, "binutils")
    return len(re.findall(pattern, run(tool, "--disassemble", "--no-show-raw-insn", object_file)))


# Without --all, tests run only for the sets that this machine has.
_others = pytest.mark.nightly("builds all instruction sets")
each_isa = pytest.mark.parametrize(
    "isa", [pytest.param(s, marks=[] if s in sets_here() else _others) for s in ("avx512", "avx2", "baseline")]
)
each_source = pytest.mark.parametrize("source", ["kernels", "backward_kernels"])


def assert_multiplies_whole_registers(build: Path, isa: str, source: str, tool: str = "objdump") -> None:
    whole, less = MULTIPLY_ADD[isa]
    (kernels,) = (build / f"cpu/CMakeFiles/flashattn_cpu_{isa}.dir").glob(f"{source}.*.o")
    assert count(whole, kernels, tool) > 100  # each register tile multiplies 12 or 24 vectors, and there are several
    assert count(whole, kernels, tool) > 2 * count(less, kernels, tool)


@pytest.mark.skipif(ARM, reason="not an x86-64 machine")
@each_source
@each_isa
def test_the_kernels_multiply_whole_registers(drivers, isa, source):
    assert_multiplies_whole_registers(drivers, isa, source)


@each_source
def test_the_kernels_multiply_whole_registers_of_neon(neon_drivers, source):
    assert_multiplies_whole_registers(neon_drivers, "neon", source, "aarch64-linux-gnu-objdump")
