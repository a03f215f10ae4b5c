"""The kernels of every instruction set agree with the plain formula, and a machine runs its best set.

This machine's sets run natively. NEON is tested under an emulator, and so are x86 processors with fewer instructions.
"""

import pytest

from tests.core.programs import ARM, NAMES, each_set, python, require, run, sets_here
from tests.promises import promise

PRINT_SET = "import flashattn_core; print(flashattn_core.backends()['cpu'])"


def test_the_best_is_taken():
    assert python(PRINT_SET).stdout.startswith(f"{NAMES[sets_here()[0]]}, ")


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(sets_here())))
def test_one_that_is_not_to_be_had_is_an_error(name):
    result = python(PRINT_SET, exit_code=1, FLASHATTN_CPU_ISA=name)
    expected = f"expected one that this machine runs: {', '.join(sets_here())}"
    assert f"FLASHATTN_CPU_ISA is '{name}', {expected}" in result.stderr


def parts(direction: str, cases: int, each: int) -> list:
    """Divides the driver's cases into pytest parameters of `each` cases.

    The first parameter always runs. With --all all others run, otherwise one of them.
    """
    others = range(each, cases, each)
    turn = pytest.mark.rotate(len(others))
    return [(direction, 0, each), *(pytest.param(direction, first, each, marks=turn) for first in others)]


def assert_each_case_matches(name: str, first: int, cases: int, *program: object) -> None:
    """The driver must use the instruction set `name`. Its results must be right, and the same on 1 and 3 threads."""
    (one, by_one), (three, by_three) = (
        run(*program, cases, first, FLASHATTN_CPU_ISA=name, FLASHATTN_NUM_THREADS=threads).split(": ", 1)
        for threads in ("1", "3")
    )
    assert (one, three) == (f"{NAMES[name]}, 1 thread", f"{NAMES[name]}, 3 threads")
    assert by_one.startswith(f"{cases} cases, ")
    assert by_one == by_three


@promise("each instruction set stays within the same bounds")
@each_set
@pytest.mark.parametrize(("direction", "first", "cases"), parts("forward", 600, 60) + parts("backward", 300, 30))
def test_each_one_over_the_options(drivers, name, direction, first, cases):
    assert_each_case_matches(name, first, cases, drivers / "passes", direction)


@promise("NEON stays within the same bounds, under an emulator")
@pytest.mark.parametrize("name", ["neon", pytest.param("baseline", marks=pytest.mark.nightly("another build"))])
@pytest.mark.parametrize(("direction", "first", "cases"), parts("forward", 250, 10) + parts("backward", 80, 5))
def test_arm_over_the_options(neon_drivers, name, direction, first, cases):
    require("qemu-aarch64", "qemu-user")
    assert_each_case_matches(name, first, cases, "qemu-aarch64", neon_drivers / "passes", direction)


@each_set
def test_exp2_and_tanh(drivers, name):
    assert run(drivers / f"simd_functions_{name}").startswith(f"{NAMES[name]}: ")


@promise("a processor runs its best instruction set, and no instruction that it lacks")
@pytest.mark.skipif(ARM, reason="every 64-bit ARM has NEON")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("processor", "best"), [("Nehalem", "baseline"), ("Haswell", "avx2")])
def test_a_lesser_processor_meets_nothing_that_it_lacks(drivers, everything, processor, best, direction):
    # Neither emulated processor has AVX-512, and Nehalem has no AVX. An instruction that the processor lacks ends the
    # program.
    require("qemu-x86_64", "qemu-user")
    cases = 30 if everything else 6
    output = run("qemu-x86_64", "-cpu", processor, drivers / "passes", direction, cases)
    assert output.startswith(f"{NAMES[best]}, ")
