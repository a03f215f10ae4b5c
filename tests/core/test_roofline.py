"""The bounds that benchmarks divide by: counted work over measured time, with the kernels' own threads."""

import flashattn_core
import pytest

# No machine of this decade is outside: a unit that is wrong by a thousand is.
PLAUSIBLE = {"peak_flops": (1e8, 1e14), "read_bandwidth": (1e8, 1e13)}


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_bounds_are_per_second(name):
    low, high = PLAUSIBLE[name]
    assert low < getattr(flashattn_core, name)() < high


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_nonsense_in_the_environment_is_named(name, run_python):
    failed = run_python(f"import flashattn_core; flashattn_core.{name}()", FLASHATTN_NUM_THREADS="many")
    assert "FLASHATTN_NUM_THREADS" in failed.stderr
