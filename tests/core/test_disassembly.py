"""The compiled kernels of each instruction set use the instructions of that set, and none of newer sets.

Kernels that were built without their set's flags would still compute correctly, but slowly. Code that every processor
runs must contain no instruction that only some processors have.
"""

import re
from pathlib import Path

import pytest

from tests.core.programs import ARM, require, run, sets_here

ON_X86 = pytest.mark.skipif(ARM, reason="not an x86-64 machine")

# Two patterns for each set. The first finds multiply-adds on whole registers, or multiplications if the set has no
# multiply-add. The second finds instructions that make kernels slow: the same instructions on smaller registers, and
# multiplications that a multiply-add could replace.
MULTIPLY_ADD = {
    "avx512": (r"\tvfmadd\w+ps .*%zmm", r"\tvfmadd\w+(ss|ps) .*%[xy]mm|\tvmulps"),
    "avx2": (r"\tvfmadd\w+ps .*%ymm", r"\tvfmadd\w+(ss|ps) .*%xmm|\tvmulps"),
    "baseline": (r"\tmulps .*%xmm", r"\tmulss"),
    "neon": (r"\tfmla\tv\d+\.4s", r"\tfmadd|\tfmul\tv\d+\.4s"),
}
AVX = r"\tv\w+ .*%"  # the names of instructions of AVX and all later sets begin with v
AVX_512 = r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]"
TOO_NEW = {"baseline": AVX, "avx2": AVX_512}


def objects(build: Path, target: str) -> list[Path]:
    found = sorted((build / "cpu" / "CMakeFiles" / f"{target}.dir").glob("*.o"))
    assert found
    return found


def count(pattern: str, object_file: Path, tool: str = "objdump") -> int:
    require(tool, "binutils")
    return len(re.findall(pattern, run(tool, "--disassemble", "--no-show-raw-insn", object_file)))


def each_of(*sets: str) -> pytest.MarkDecorator:
    """Parametrizes a test by instruction sets. Without --all, it runs only for sets that this machine has."""
    nightly = pytest.mark.nightly("builds all instruction sets")
    return pytest.mark.parametrize(
        "isa", [isa if isa in sets_here() else pytest.param(isa, marks=nightly) for isa in sets]
    )


each_isa = each_of("avx512", "avx2", "baseline")
each_source = pytest.mark.parametrize("source", ["kernels", "backward_kernels"])


def assert_multiplies_whole_registers(build: Path, isa: str, source: str, tool: str = "objdump") -> None:
    whole, less = MULTIPLY_ADD[isa]
    (kernels,) = (path for path in objects(build, f"flashattn_cpu_{isa}") if path.name.startswith(f"{source}."))
    assert count(whole, kernels, tool) > 100  # each register tile multiplies 12 or 24 vectors, and there are several
    assert count(whole, kernels, tool) > 2 * count(less, kernels, tool)


@ON_X86
@each_source
@each_isa
def test_the_kernels_multiply_whole_registers(drivers, isa, source):
    assert_multiplies_whole_registers(drivers, isa, source)


@each_source
def test_the_kernels_multiply_whole_registers_of_neon(neon_drivers, source):
    assert_multiplies_whole_registers(neon_drivers, "neon", source, "aarch64-linux-gnu-objdump")


@ON_X86
@each_of(*TOO_NEW)
def test_no_instruction_is_newer_than_the_set(drivers, isa):
    assert [path.name for path in objects(drivers, f"flashattn_cpu_{isa}") if count(TOO_NEW[isa], path)] == []


@ON_X86
def test_what_every_processor_runs_is_of_no_set(drivers):
    assert [path.name for path in objects(drivers, "flashattn_cpu") if count(AVX, path)] == []


@ON_X86
@each_isa
def test_all_that_a_set_defines_is_its_own(drivers, isa):
    # If several objects define the same inline function, such as one of the standard library, the linker keeps one
    # copy for all callers. That copy could contain AVX-512, although processors without AVX-512 call it.
    require("nm", "binutils")
    for path in objects(drivers, f"flashattn_cpu_{isa}"):
        symbols = run("nm", "--demangle", "--defined-only", "--extern-only", path).splitlines()
        assert symbols
        assert [line for line in symbols if f" flashattn::cpu::{isa}::" not in line] == []
