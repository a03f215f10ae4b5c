"""Every instantiation that launches ask for compiles, for each generation of GPUs; those of common models spill nothing."""

import itertools

import launches
import mlx.core as mx
import pytest
from flashattn_core.attention import lowered
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree
from nvrtc import compiled

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
KERNELS = {"cuda_decode": (1, 8), "cuda_prefill": (100,), "cuda_prefill_hopper": (100,), "cuda_rowwise": (40,)}
DIMS = [8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]


def texts(kernel, dtype, dim, value_dim, length, mask="causal", heads=4, **options):
    """Of the launches of a call with 2 key/value heads."""
    query, key, value = (
        mx.zeros((1, n, rows, columns), DTYPES[dtype])
        for n, rows, columns in ((heads, length, dim), (2, 300, dim), (2, 300, value_dim))
    )
    described = launches.forward(lowered(query, key, value, None, mask, kernel=kernel, **options), "cuda")
    return [launch["source"] for launch in described]


def runs_on(kernel, dtype, architecture="sm_90a"):
    return kernel != "cuda_prefill_hopper" or (architecture == "sm_90a" and dtype != "float32")


def assert_compiles(architecture, sources):
    for source in sources:
        done = compiled(source, architecture)
        assert not done.warnings
        yield done


CASES = [
    (kernel, dtype, architecture, dim)
    for kernel, dtype, architecture, dim in itertools.product(KERNELS, DTYPES, ARCHITECTURES, DIMS)
    if runs_on(kernel, dtype, architecture)
]


@pytest.mark.rotate(60)
@pytest.mark.parametrize(("kernel", "dtype", "architecture", "dim"), CASES)
def test_head_dims(kernel, dtype, architecture, dim):
    for value_dim in {dim, 64, 128}:
        for length in KERNELS[kernel]:
            for _ in assert_compiles(architecture, texts(kernel, dtype, dim, value_dim, length)):
                pass


MASKS = {
    "none": None,
    "window": SlidingWindow(9),
    "key range": KeyRange(mx.array([3]), mx.array([200])),
    "tree": Causal() & Tree.from_parents([-1, 0, 0]),
    "bool array": mx.zeros((300,), mx.bool_),
    "additive array": mx.zeros((300,)),
}


@pytest.mark.rotate(12)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_and_options(kernel, mask):
    for dtype in DTYPES:
        for options in ({}, {"softcap": 5.0, "sinks": mx.zeros(4), "alibi_slopes": mx.ones(4)}):
            if runs_on(kernel, dtype) and (mask != "additive array" or dtype == "float32"):
                for length in KERNELS[kernel]:
                    sources = texts(kernel, dtype, 128, 128, length, MASKS[mask], **options)
                    assert all(done.registers for done in assert_compiles("sm_90a", sources))


# The calls of models: query heads to a key/value head, queries, head_dim.
MODELS = {
    "Mistral, Qwen2": (14, 4096, 128, SlidingWindow(512)),
    "gpt-oss": (16, 4096, 64, SlidingWindow(128)),
    "gemma3": (4, 4096, 256, SlidingWindow(1024)),
    "llama": (14, 4096, 128, "causal"),
    "decode": (14, 1, 128, "causal"),
    "decode of gemma3": (4, 1, 256, "causal"),
    "speculative decoding": (14, 8, 128, "causal"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", MODELS)
def test_no_spills_in_what_models_call(model, dtype):
    heads, length, dim, mask = MODELS[model]
    kernels = ["cuda_decode"] if length <= 16 else ["cuda_prefill", "cuda_prefill_hopper"]
    for kernel in kernels:
        if runs_on(kernel, dtype):
            sources = texts(kernel, dtype, dim, dim, length, mask, heads)
            assert [done.spilled for done in assert_compiles("sm_90a", sources)] == [0] * len(sources)
