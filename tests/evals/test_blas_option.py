"""If MLX uses the slow reference BLAS, as on Linux CPUs, flash-eval warns on stderr and on the page. With --blas, the
command starts again with a faster BLAS.

More tests of --blas are in tests/patch/test_blas.py.
"""

import pytest
from flash_evals.work import machine
from mlxlm_flash_patch.blas import REFERENCE

pytestmark = pytest.mark.slow("processes that import for seconds")


@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune", "kernels"])
@pytest.mark.parametrize(("blas", "said"), [("reference", 1), (None, 0)])
def test_the_reference_blas_is_named(invoke, small_run, monkeypatch, command, blas, said):
    """If the BLAS is slow, stderr and the page have one line that says so and names the cure."""
    monkeypatch.setattr(machine, "blas", lambda: blas)
    done = invoke(*small_run(command))
    assert (done.exit_code, done.stderr) == (0, f"{REFERENCE}\n" * said)
    assert done.stdout.splitlines().count(REFERENCE) == said
