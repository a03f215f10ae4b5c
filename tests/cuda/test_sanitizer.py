"""NVIDIA's compute-sanitizer finds nothing in a few ragged calls of each kernel, and finds planted faults."""

import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("requires_gpu")

SANITIZER = shutil.which("compute-sanitizer")
# report() sets DIM, LENGTH and HEADS, of queries; keys have half as many. Keys do not fill their last tile.
START = """
import mlx.core as mx
from flashattn_core import _ext, flash_attention, quantized_flash_attention
from flashattn_core.arguments import lowered
from flashattn_core.masks import Causal, KeyRange, SlidingWindow

mx.set_cache_limit(0)
normal = lambda heads, length, dtype: mx.random.normal((1, heads, length, DIM)).astype(dtype)
"""
FORWARD = """
for dtype in (mx.bfloat16, mx.float32):
    key, value = normal(HEADS // 2, 136, dtype), normal(HEADS // 2, 136, dtype)
    for kernel, precision, is_read in FORMS[dtype.size]:
        keys = key if is_read else key[:, ::-1]  # the tensor memory accelerator takes no heads in reverse
        for length in (1, 4) if kernel == "cuda_decode" else (72, LENGTH):
            query, sinks = normal(HEADS, length, dtype), mx.random.normal((HEADS,)).astype(dtype)
            hidden = mx.random.uniform(shape=(length, 136)) > 0.9
            for mask in (None, SlidingWindow(33) & KeyRange(mx.array([5])), Causal() & hidden):
                call = lowered(query, keys, value, mask=mask, sinks=sinks, precision=precision)
                for is_small in (False, True) if kernel == "cuda_prefill" and dtype.size == 2 and is_read else (True,):
                    variant = _ext.Variant(getattr(_ext.Kernel, kernel), precision == "input", is_small)
                    mx.eval(_ext.unchecked_attention(call, variant, True, None))
    for length in (4, 40):
        packed = [mx.quantize(x, group_size=64, bits=4) for x in (key, value)]
        mx.eval(quantized_flash_attention(normal(HEADS, length, dtype), *packed, mask="causal", group_size=64, bits=4))
print("all calls ran")
"""
GRADIENTS = """
for dtype in (mx.bfloat16, mx.float32):
    query, dout = normal(HEADS, LENGTH, dtype), normal(HEADS, LENGTH, dtype)
    key, value = normal(HEADS // 2, 72, dtype), normal(HEADS // 2, 72, dtype)
    sinks = mx.random.normal((HEADS,)).astype(dtype)
    hidden = mx.random.uniform(shape=(LENGTH, 72)) > 0.9
    for precision in ("float32", "input") if dtype.size == 2 else ("float32",):  # float32 has the same kernels in both
        for mask in ("causal", SlidingWindow(33), Causal() & hidden):
            run = lambda *x: flash_attention(*x[:3], sinks=x[3], mask=mask, precision=precision, kernel="cuda_prefill")
            mx.eval(mx.vjp(run, [query, key, value, sinks], [dout]))
print("all calls ran")
"""
PLANTED = {
    "memcheck": "out[1ll << 40] = 1;",
    # Each of two warps repeatedly reads what the other warp writes.
    "racecheck": """
        __shared__ volatile int w[64];
        int sum = 0;
        for (int i = 0; i < 100; ++i) { w[threadIdx.x] = i * threadIdx.x; sum += w[63 - threadIdx.x]; }
        out[threadIdx.x] = sum;""",
}
PLANT = """
import mlx.core as mx
kernel = mx.fast.cuda_kernel(name="cuda_planted", input_names=["x"], output_names=["out"], source=SOURCE)
shape = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.int32]}
mx.eval(kernel(inputs=[mx.zeros(64)], **shape))
"""


def report(tool, program, **names):
    """Runs `program` with the variables `names`. Returns the tool's report on kernels with "cuda_" in their names."""
    if SANITIZER is None:
        pytest.skip("no compute-sanitizer: it comes with NVIDIA's CUDA toolkit")
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    # API errors are not reported, because MLX asks for functions that some drivers lack, and goes on without them.
    options = ["--tool", tool, "--kernel-name", "kns=cuda_", "--report-api-errors", "no"]
    if tool == "racecheck":
        options += ["--racecheck-report", "all"]  # because the report "analysis" leaves out the planted race
    done = subprocess.run(
        [SANITIZER, *options, sys.executable, "-c", given + program], capture_output=True, text=True, timeout=900
    )
    return done.stdout + done.stderr


def assert_nothing_is_found(tool, program, dim, length, **names):
    # MLX allocates pages of 16 KB. With 2048 // dim heads, keys and values fill their pages, so that memcheck notices a
    # read behind the last row. For racecheck, which is slow and looks at one block at a time, one key head is enough.
    heads = {"memcheck": 2048 // dim, "racecheck": 2}[tool]
    said = report(tool, START + program, DIM=dim, LENGTH=length, HEADS=heads, **names)
    assert "all calls ran" in said, said
    assert re.search("SUMMARY: 0 (errors|hazards)", said), said


@pytest.mark.parametrize(("dim", "length"), [(64, 272), (128, 136)])
@pytest.mark.parametrize("tool", PLANTED)
def test_nothing_is_found_in_the_forward_pass(tool, dim, length):
    forms = [(kernel, "float32", True) for kernel in ("cuda_decode", "cuda_prefill", "cuda_rowwise")]
    further = [("cuda_prefill", "input", True), ("cuda_prefill", "float32", False), ("cuda_prefill", "input", False)]
    assert_nothing_is_found(tool, FORWARD, dim, length, FORMS={4: forms, 2: forms + further})


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("tool", PLANTED)
def test_nothing_is_found_in_the_gradient(tool, dim):
    assert_nothing_is_found(tool, GRADIENTS, dim, 136)


@pytest.mark.parametrize("tool", PLANTED)
def test_what_is_planted_is_found(tool):
    said = report(tool, PLANT, SOURCE=PLANTED[tool])
    assert re.search(r"SUMMARY: [1-9]\d* (error|hazard)", said), said
