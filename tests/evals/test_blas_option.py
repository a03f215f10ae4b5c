"""If MLX uses the slow reference BLAS, as on Linux CPUs, flash-eval warns on stderr and on the page. With --blas, the
command starts again with a faster BLAS.

More tests of --blas are in tests/patch/test_blas.py.
"""

import json
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from flash_evals.work import machine
from mlxlm_flash_patch.blas import INSTALL, REFERENCE

pytestmark = pytest.mark.slow("processes that import for seconds")

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD; run this test on Linux")


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


def test_what_cannot_be_measured_is_said_alone(refused, small, monkeypatch):
    monkeypatch.setattr(machine, "blas", lambda: "reference")
    refused(*small, "--json", "no/such/folder/file")
    if "--model" in small:
        refused(*small, "--model", "no/such/folder")


@LINUX
def test_what_is_no_library_is_refused(refused, small):
    line = refused(*small, "--blas", "no/such/file")
    assert line == "Error: --blas takes auto or the file of a library, not 'no/such/file'"


@LINUX
@pytest.mark.skipif(find_library("openblas") is None, reason=f"no OpenBLAS: {INSTALL}")
def test_the_command_starts_again_with_openblas(small, tmp_path):
    out = tmp_path / "out.json"
    program = [Path(sys.executable).parent / "flash-eval", *map(str, small), "--blas", "auto", "--json", out]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert REFERENCE not in done.stdout
    assert machine_in(out)["blas"] == "openblas"
