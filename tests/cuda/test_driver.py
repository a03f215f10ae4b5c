"""Error messages say what the machine lacks, and what to do about it."""

import pytest

from tests.emulators import fake_gpu
from tests.promises import promise

BEFORE = {
    "old driver": (
        {"software": "old driver"},
        "the driver has no cuTensorMapEncodeTiled: install version 550.54.14 or a newer one",
    ),
    "driver fails": ({"cuDeviceGetAttribute": "3"}, "cuDeviceGetAttribute: it says why"),
    "old GPU": (
        {"MAJOR": "7"},
        "the GPU has compute capability 7.0, expected 8.0 or more: compute on mx.cpu, or on a newer GPU",
    ),
    "new GPU": (
        {"MAJOR": "12"},
        "the GPU has compute capability 12.0, which NVRTC 13.0 does not know: install a newer NVRTC",
    ),
}
AFTER = {
    "does not compile": ({"nvrtcCompileProgram": "6"}, "", "nvrtcCompileProgram: NVRTC_ERROR\nthe log"),
    "does not load": ({"cuModuleLoadData": "200"}, "compiles", "cuModuleLoadData: it says why"),
    "shared memory": (
        {"shared": 100_001},
        "loads",
        "a block needs 100001 bytes of shared memory, but the GPU has 100000",
    ),
}


@promise("an unfit NVIDIA driver, GPU or NVRTC raises NoKernelError with the cure")
@pytest.mark.parametrize("case", BEFORE)
def test_what_is_missing_is_refused_before_the_graph(case):
    answers, error = BEFORE[case]
    assert fake_gpu.said(**answers) == f"NoKernelError: [flash_attention] {error}\n"


@promise("a kernel that cannot be built is named, and tried again at the next call")
@pytest.mark.parametrize("case", AFTER)
def test_what_cannot_be_built_is_tried_again_at_the_next_call(case):
    answers, last, error = AFTER[case]
    before, after = fake_gpu.said(**answers).split("runtime_error: [flash_attention] ")
    assert before.rpartition("\n")[0].rpartition("\n")[2].startswith(last)
    assert not last or before.count(f"{last} ") == 2
    assert after == (
        f"{error}\nThis happened while building kernel for sm_90a, driver for CUDA 12.2, NVRTC 13.0. "
        'Try a newer driver, or kernel="cuda_rowwise".\n'
    )


@pytest.mark.parametrize(("major", "architecture"), [("8", "sm_80"), ("9", "sm_90a")])
def test_the_code_is_for_this_very_architecture(major, architecture):
    assert f"compiles text of kernel --gpu-architecture={architecture}\n" in fake_gpu.said(MAJOR=major)


@pytest.mark.parametrize(("shared", "asked"), [(48 * 1024, ""), (48 * 1024 + 1, "has 49153 bytes\n")])
def test_much_shared_memory_is_asked_for(shared, asked):
    assert fake_gpu.said(shared=shared).endswith(f"loads text of kernel\n{asked}")
