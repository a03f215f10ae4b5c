"""On a GPU, a fault in a kernel's text is found and named before the kernel is used. So a model's tokens stay right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises import promise

pytestmark = pytest.mark.usefixtures("requires_gpu", "requires_plants")

HERE = Path(__file__).parent
RESULT = "return RowResult{normalise / softmax.row_sum,"  # in the text of every kernel
FINITE = "finite &= is_finite(merged.slice.columns[i]);"  # in the text of cuda_decode only
NAN = "merged.slice.columns[i] *= row_position(first_row + row, kv_head, group).query == 0 ? INFINITY * 0.0f : 1.0f;"


def started(cache, **more):
    variables = {"FLASHATTN_CACHE": str(cache), "FLASHATTN_CHECK": "once", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **variables, **more}
    return subprocess.Popen([sys.executable, HERE / "planted_model.py"], env=environment, stdout=subprocess.PIPE)


def generated(process):
    found = json.loads(process.communicate()[0])
    assert found["on"] == found["off"]
    return found


FAULTS = {
    "does not compile": ("RowResult{", "NoSuchThing{"),
    "one percent in a head": (RESULT, f"{RESULT[:-1]} * (head == 1 ? 1.01f : 1.0f),"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_all_kernels_leaves_mlx_lm_its_own_attention(tmp_path, fault):
    found = generated(started(tmp_path, FLASHATTN_PLANT=" => ".join(FAULTS[fault])))
    assert not found["calls"]
    assert found["left"] > 0
    checks = [text for text in found["said"] if text.startswith("KernelWarning")]
    assert any("cuda_decode fails its check on NVIDIA" in text for text in checks)
    assert all(str(tmp_path / "failed") in text for text in checks)


@promise("a planted fault on a GPU leaves the next kernel")
def test_nan_in_one_kernel_leaves_the_next(tmp_path):
    found = generated(started(tmp_path, FLASHATTN_PLANT=f"{FINITE} => {NAN}"))
    assert found["left"] == 0
    assert "cuda_decode" not in found["calls"]
    [warning] = [text for text in found["said"] if text.startswith("KernelWarning")]
    assert "cuda_decode fails its check" in warning
