"""Every instruction set that this machine runs obeys the rule, and the best one is taken."""

import platform
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


def sets_here() -> list[str]:
    """What the operating system says that this machine can do, apart from what the extension finds out."""
    if platform.machine() in ("arm64", "aarch64"):
        return ["neon", "baseline"]
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    needs = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": {"avx2", "fma"}, "baseline": set()}
    return [name for name, needed in needs.items() if needed <= set(flags)]


@pytest.mark.parametrize("name", sets_here())
def test_each_one_here(run_python, name):
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
