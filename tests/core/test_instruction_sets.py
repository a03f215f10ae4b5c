"""Every instruction set obeys the rule, and the best one that the machine runs is taken.

Those of this machine run as they are; NEON, and x86 processors that can do less, under an emulator.
"""

import os
import platform
import subprocess
from pathlib import Path

import pytest

NAMES = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "baseline": "baseline"}  # best first

CHECK = """
import mlx.core as mx, numpy as np, flashattn_core
from flashattn_core.masks import SlidingWindow
from oracle import assert_matches_reference, draw
rng = np.random.default_rng(0)
for dtype in ("float32", "float16", "bfloat16"):
    for dim, value_dim in [(1, 5), (7, 7), (64, 80), (40, 256)]:
        for length, key_len in [(1, 1), (1, 700), (8, 33), (33, 97), (97, 63)]:
            for mask in (None, "causal", SlidingWindow(20), mx.array(rng.random((length, key_len)) > 0.4)):
                q, k, v = draw(rng, heads=6, length=length, key_len=key_len, dim=dim, value_dim=value_dim, dtype=dtype)
                assert_matches_reference(q, k, v, mask=mask)
                assert_matches_reference(q, k, v, mask=mask, softcap=3.0, alibi_slopes=mx.linspace(0, 1, 6))
print(flashattn_core.backends()["cpu"])
"""


ARM = platform.machine() in ("arm64", "aarch64")
SETS = ["neon", "baseline"] if ARM else ["avx512", "avx2", "baseline"]


def sets_here() -> list[str]:
    """What the operating system says that this machine can do, apart from what the extension finds out."""
    if ARM:
        return SETS
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    needs = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": {"avx2", "fma"}, "baseline": set()}
    return [name for name in SETS if needs[name] <= set(flags)]


each_set = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(name not in sets_here(), reason=f"this machine has no {NAMES[name]}")
        )
        for name in SETS
    ],
)


def run(*command: object, **environment: str) -> str:
    """The output of a program that succeeds."""
    done = subprocess.run(
        [*map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@each_set
def test_each_one_from_python(run_python, name):
    result = run_python(CHECK, FLASHATTN_CPU_ISA=name)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{NAMES[name]}, ")


def test_the_best_is_taken(run_python):
    result = run_python("import flashattn_core; print(flashattn_core.backends()['cpu'])")
    assert result.stdout.startswith(f"{NAMES[sets_here()[0]]}, ")


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(sets_here())))
def test_one_that_is_not_to_be_had_is_an_error(run_python, name):
    result = run_python("import flashattn_core; flashattn_core.backends()", FLASHATTN_CPU_ISA=name)
    assert result.returncode == 1
    assert (
        f"FLASHATTN_CPU_ISA is '{name}', expected one that this machine runs: {', '.join(sets_here())}" in result.stderr
    )


def assert_each_case_matches(name: str, cases: int, *program: object) -> None:
    """The driver takes the set that is asked for, its cases obey the rule, and threads change no bit of them."""
    by_threads = {
        threads: run(*program, cases, FLASHATTN_CPU_ISA=name, FLASHATTN_NUM_THREADS=threads) for threads in ("1", "3")
    }
    results = {threads: output.split(": ", 1) for threads, output in by_threads.items()}
    assert results["1"][0] == f"{NAMES[name]}, 1 thread"
    assert results["3"][0] == f"{NAMES[name]}, 3 threads"
    assert results["1"][1].startswith(f"{cases} cases, ")
    assert results["1"][1] == results["3"][1]


@each_set
@pytest.mark.parametrize(("program", "cases"), [("forward", 600), ("backward", 300)])
def test_each_one_over_the_options(drivers, name, program, cases):
    assert_each_case_matches(name, cases, drivers / program)


@pytest.mark.parametrize(
    ("name", "program", "cases"),
    [("neon", "forward", 250), ("baseline", "forward", 50), ("neon", "backward", 80), ("baseline", "backward", 20)],
)
def test_arm_over_the_options(neon_drivers, require, name, program, cases):
    require("qemu-aarch64", "qemu-user")
    assert_each_case_matches(name, cases, "qemu-aarch64", neon_drivers / program)


@each_set
def test_exp2_and_tanh(drivers, name):
    assert run(drivers / f"simd_functions_{name}").startswith(f"{NAMES[name]}: ")


def test_exp2_and_tanh_of_neon(neon_drivers, require):
    require("qemu-aarch64", "qemu-user")
    assert run("qemu-aarch64", neon_drivers / "simd_functions_neon").startswith("NEON: ")


@pytest.mark.skipif(ARM, reason="every 64-bit ARM has NEON")
@pytest.mark.parametrize("program", ["forward", "backward"])
@pytest.mark.parametrize(("processor", "best"), [("Nehalem", "baseline"), ("Haswell", "avx2")])
def test_a_lesser_processor_meets_nothing_that_it_lacks(drivers, require, processor, best, program):
    # Neither emulated processor knows AVX-512, Nehalem no AVX at all: one such instruction would end the program.
    require("qemu-x86_64", "qemu-user")
    assert run("qemu-x86_64", "-cpu", processor, drivers / program, 30).startswith(f"{NAMES[best]}, ")


def test_arm_takes_neon(neon_drivers, require):
    require("qemu-aarch64", "qemu-user")
    assert run("qemu-aarch64", neon_drivers / "forward", 1).startswith("NEON, ")
