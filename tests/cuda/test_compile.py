"""Every kernel that launches ask for compiles for each generation of GPUs; those that models call spill no register."""

import itertools
from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core.arguments import lowered
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

from tests import launches
from tests.core.gradient_oracle import draw_call
from tests.cuda.nvrtc import compiled
from tests.metal import metal_backward

# Each with the KiB of shared memory that a block can have, on which the tiles depend.
ARCHITECTURES = {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
LENGTHS = {"cuda_decode": 3, "cuda_rowwise": 40}
LENGTHS |= dict.fromkeys(("cuda_prefill", "cuda_prefill_rounded"), 100)
LENGTHS |= dict.fromkeys(("cuda_prefill_hopper", "cuda_prefill_hopper_rounded"), 100)


def assert_compiles(architecture, kernel, dtype, dim, value_dim=None, mask="causal", length=None, heads=4, **options):
    """Compiles the launches of a call with 2 key/value heads. Returns the bytes that they spill."""
    query, key, value = (
        mx.zeros((1, n, rows, columns), DTYPES[dtype])
        for n, rows, columns in ((heads, length or LENGTHS[kernel], dim), (2, 300, dim), (2, 300, value_dim or dim))
    )
    is_hoppers = "hopper" in kernel
    if "bits" in options:
        key, value = (mx.quantize(array, options["group_size"], options["bits"]) for array in (key, value))
    elif options.pop("strided", False):
        is_hoppers = False  # the TMA cannot read such rows
        key = key.swapaxes(2, 3).flatten().reshape(1, 2, dim, 300).swapaxes(2, 3)
    if "sinks" in options:
        options["sinks"] = mx.zeros(heads, DTYPES[dtype])
    kernel, precision, _ = launches.form(kernel)
    with launches.shared_memory(ARCHITECTURES[architecture], 90 if is_hoppers else 0):
        described = launches.forward(
            lowered(query, key, value, None, mask, kernel=kernel, **precision, **options), "cuda"
        )
    if is_hoppers:
        assert described[-1]["function"].startswith("cuda_prefill_hopper_")
    assert all(launch["dynamic_shared"] <= 1024 * ARCHITECTURES[architecture] for launch in described)
    return assert_each_compiles(architecture, described)


def assert_each_compiles(architecture, described):
    done = [compiled(launch["source"], architecture) for launch in described]
    assert [each.warnings for each in done] == [""] * len(described)
    return sum(each.spilled for each in done)


def runs_on(kernel, dtype, architecture, dim=128):
    in_float32 = dtype != "float32" or not (kernel.endswith("_rounded") or ("hopper" in kernel and dim > 128))
    return (architecture == "sm_90a" or "hopper" not in kernel) and in_float32


def cases(*further):
    """All kernels and dtypes on the architectures that have them, combined with the elements of `further`."""
    every = itertools.product(LENGTHS, DTYPES, ARCHITECTURES, *further)
    return [case for case in every if runs_on(*case[:3])]


@pytest.mark.rotate(115, nightly=3)
@pytest.mark.parametrize(
    ("kernel", "dtype", "architecture", "dim"),
    [case for case in cases([8, 24, 64, 80, 96, 128, 192, 256]) if runs_on(*case)],
)
def test_head_dims(kernel, dtype, architecture, dim):
    for value_dim in {dim, 64}:
        assert_compiles(architecture, kernel, dtype, dim, value_dim)


@pytest.mark.rotate(23)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["cuda_decode", "cuda_rowwise"])
def test_large_heads_and_quantised(kernel, dtype, architecture):
    for dim, value_dim in ((320, 32), (512, 512)):
        assert_compiles(architecture, kernel, dtype, dim, value_dim)
    for bits, group_size in ((1, 128), (3, 32), (4, 64), (8, 64)):
        assert_compiles(architecture, kernel, dtype, 128, bits=bits, group_size=group_size)


@pytest.mark.rotate(23)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kernel", ["cuda_decode", "cuda_prefill"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64), (8, 128)])
def test_integer_tiles(kernel, dtype, architecture, bits, group_size):
    for dim, value_dim in ((128, 128), (256, 128), (384 - group_size, group_size)):
        assert_compiles(architecture, kernel, dtype, min(dim, 256), value_dim, bits=bits, group_size=group_size)


@pytest.mark.rotate(23)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 256])
def test_decoding_large_groups(dim, dtype, architecture):
    for rows in (16, 48, 128):
        assert_compiles(architecture, "cuda_decode", dtype, dim, length=8, heads=rows // 4)


MASKS = {
    "none": None,
    "window": SlidingWindow(9),
    "key range": KeyRange(mx.array([3]), mx.array([200])),
    "tree": Causal() & Tree.from_parents([-1, 0, 0]),
    "bool array": mx.zeros((300,), mx.bool_),
    "additive array": mx.zeros((300,)),
}
OPTIONS = [{}, {"softcap": 5.0, "alibi_slopes": mx.ones(4), "sinks": True}, {"strided": True}]


@pytest.mark.rotate(105, nightly=3)
@pytest.mark.parametrize(("kernel", "dtype", "architecture", "mask"), cases(MASKS))
def test_masks_and_options(kernel, dtype, architecture, mask):
    for options in OPTIONS:
        if mask != "additive array" or dtype == "float32":
            assert_compiles(architecture, kernel, dtype, 128, mask=MASKS[mask], **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_block_maps(architecture):
    for dtype in (mx.bool_, *DTYPES.values()):
        assert assert_each_compiles(architecture, launches.block_map(mx.zeros((64, 64), dtype), "cuda")) == 0


# Calls of models: dtype, query heads per key/value head, queries, head_dim, mask and options.
MODELS = {
    "Mistral": ("bfloat16", 7, 128, 128, SlidingWindow(512), {}),
    "gpt-oss": ("bfloat16", 8, 128, 64, SlidingWindow(128), {"sinks": True}),
    "gemma3": ("bfloat16", 2, 128, 256, SlidingWindow(1024), {}),
    "gemma": ("bfloat16", 2, 128, 256, "causal", {}),
    "gemma2": ("bfloat16", 2, 128, 256, "causal", {"softcap": 50.0}),
    "BLOOM": ("bfloat16", 1, 128, 64, "causal", {"alibi_slopes": mx.ones(2)}),
    "a padded batch": ("bfloat16", 7, 128, 64, Causal() & KeyRange(mx.array([3])), {}),
    "llama": ("bfloat16", 7, 128, 128, "causal", {}),
    "in float32": ("float32", 7, 128, 128, "causal", {}),
    "Qwen2.5-0.5B in float32": ("float32", 7, 128, 64, "causal", {}),
    "decode": ("bfloat16", 7, 1, 128, "causal", {}),
    "decode, a padded batch": ("bfloat16", 7, 1, 128, Causal() & KeyRange(mx.array([3])), {}),
    "decode in float32": ("float32", 7, 1, 128, "causal", {}),
    "decode, gemma3": ("bfloat16", 2, 1, 256, "causal", {}),
    "decode, gpt-oss": ("bfloat16", 8, 1, 64, "causal", {"sinks": True}),
    "speculative decoding": ("bfloat16", 7, 8, 128, "causal", {}),
    **{
        f"{what} over {bits} bits, {dim}": ("bfloat16", 7, length, dim, "causal", {"bits": bits, "group_size": 64})
        for what, length in (("decode", 1), ("prefill", 128))
        for bits in (4, 8)
        for dim in (64, 128)
    },
}


@pytest.mark.rotate(9)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("model", MODELS)
def test_no_spills_in_what_models_call(model, architecture):
    dtype, group, length, dim, mask, options = MODELS[model]
    many = [name for name in LENGTHS if name.startswith("cuda_prefill")]
    for kernel in ["cuda_decode"] if length <= 16 else many:
        if runs_on(kernel, dtype, architecture, dim) and not ("hopper" in kernel and "bits" in options):
            assert not assert_compiles(
                architecture, kernel, dtype, dim, mask=mask, length=length, heads=2 * group, **options
            )


@pytest.mark.rotate(45)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", ["float32", "input"])
@pytest.mark.parametrize("dim", [40, 128, 256])
def test_gradients(rng, dim, precision, dtype, architecture):
    call = replace(draw_call(rng, heads=4, length=100, key_len=90, dim=dim, dtype=dtype), mask="causal")
    with launches.shared_memory(ARCHITECTURES[architecture], 90 if architecture == "sm_90a" else 0):
        described = metal_backward.described(call, device="cuda", precision=precision)
    assert all(launch["dynamic_shared"] <= 1024 * ARCHITECTURES[architecture] for launch in described)
    spilled = assert_each_compiles(architecture, described)
    assert spilled == 0 or architecture != "sm_90a" or dim > 128
