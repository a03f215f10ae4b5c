"""If MLX uses the slow reference BLAS, as on Linux CPUs, flash-eval warns on stderr and on the page. With --blas, the
command starts again with a faster BLAS.

More tests of --blas are in tests/patch/test_blas.py.
"""

import json

import pytest
from flash_evals.work import machine
from mlxlm_flash_patch.blas import REFERENCE

pytestmark = pytest.mark.slow("processes that import for seconds")


@pytest.fixture(params=["perplexity", "speed", "finetune", "kernels"])
def small(request, small_run):
    return small_run(request.param)


def machine_in(file):
    """The field `machine` of a result file, or of its first entry."""
    result = json.loads(file.read_text())
    return (result[0] if isinstance(result, list) else result)["machine"]


@pytest.mark.parametrize(("blas", "said"), [("reference", 1), ("openblas", 0), (None, 0)])
def test_the_reference_blas_is_named(invoke, small, monkeypatch, tmp_path, blas, said):
    """If the BLAS is slow, stderr and the page have one line that says so and names the cure."""
    monkeypatch.setattr(machine, "blas", lambda: blas)
    done = invoke(*small, "--json", tmp_path / "out.json")
    assert (done.exit_code, done.stderr) == (0, f"{REFERENCE}\n" * said)
    assert done.stdout.splitlines().count(REFERENCE) == said
    assert machine_in(tmp_path / "out.json")["blas"] == blas
