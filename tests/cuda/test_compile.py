"""Every kernel compiles for each generation of GPUs. Only two of the calls that models make spill registers."""

import itertools
from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

from tests import launches
from tests.core.gradient_oracle import draw_call
from tests.core.oracle import DTYPES
from tests.cuda.nvrtc import compiled
from tests.gpu_calls import lowered_call
from tests.metal import metal_backward

# Architecture -> KiB of shared memory that a block can have. The sizes of tiles depend on this number.
ARCHITECTURES = {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
LENGTHS = {"cuda_decode": 3, "cuda_rowwise": 40}
LENGTHS |= dict.fromkeys((f"cuda_prefill{form}" for form in ("", "_rounded", "_hopper", "_hopper_rounded")), 100)


def spilled_bytes(architecture, kernel, dtype, *, length=None, heads=4, sinks=False, how=(False, False), **options):
    """Compiles the launches of a call with 2 key/value heads. Returns the bytes of registers that they spill.

    how: whether the kernels write exact_out, as in a traced call, and whether blocks are small.
    """
    is_hoppers = "hopper" in kernel and "key_layout" not in options
    if sinks:
        options["sinks"] = mx.zeros(heads, DTYPES[dtype])
    sizes = {"length": length or LENGTHS[kernel], "heads": heads, "dtype": DTYPES[dtype]}
    kernel, precision, _ = launches.form(kernel)
    with launches.shared_memory(ARCHITECTURES[architecture], 90 if is_hoppers else 0):
        call = lowered_call(kernel=kernel, **sizes, **precision, **options)
        described = launches.forward(call, "cuda", True, *how)
    if is_hoppers:
        assert described[-1]["function"].startswith("cuda_prefill_hopper_")
    return spilled_by(architecture, described)


def spilled_by(architecture, described):
    assert all(launch["dynamic_shared"] <= 1024 * ARCHITECTURES[architecture] for launch in described)
    done = [compiled(launch["source"], architecture) for launch in described]
    assert [each.warnings for each in done] == [""] * len(described)
    return sum(each.spilled for each in done)


def runs_on(kernel, dtype, architecture, dim=128):
    in_float32 = dtype != "float32" or not (kernel.endswith("_rounded") or ("hopper" in kernel and dim > 128))
    return (architecture == "sm_90a" or "hopper" not in kernel) and in_float32


def cases(*further):
    """Returns all valid combinations of kernels, dtypes, architectures and the elements of the lists in `further`."""
    every = itertools.product(LENGTHS, DTYPES, ARCHITECTURES, *further)
    return [case for case in every if runs_on(*case[:3])]


@pytest.mark.rotate(115, nightly=3)
@pytest.mark.parametrize(
    ("kernel", "dtype", "architecture", "dim"),
    [case for case in cases([8, 24, 64, 80, 96, 128, 192, 256]) if runs_on(*case)],
)
def test_head_dims(kernel, dtype, architecture, dim):
    for value_dim in {dim, 64}:
        spilled_bytes(architecture, kernel, dtype, dim=dim, value_dim=value_dim)


BOTH, HALF = ("cuda_decode", "cuda_rowwise"), ("float16", "bfloat16")
LARGE_HEADS = [{"dim": 320, "value_dim": 32}, {"dim": 512}]
QUANTISED = [{"dim": 128, "bits": bits, "group_size": size} for bits, size in ((1, 128), (3, 32), (4, 64), (8, 64))]
INTEGER_TILES = [
    {"dim": dim, "value_dim": value_dim, "bits": bits, "group_size": size}
    for bits, size in ((4, 32), (8, 64), (8, 128))
    for dim, value_dim in ((128, 128), (256, 128), (min(384 - size, 256), size))
]
LARGE_GROUPS = [{"dim": dim, "length": 8, "heads": heads} for dim in (64, 256) for heads in (4, 12, 32)]
SIZES = [
    *itertools.product(BOTH, DTYPES, LARGE_HEADS + QUANTISED),
    *itertools.product(["cuda_decode"], HALF, INTEGER_TILES),
    *itertools.product([name for name in LENGTHS if "prefill" in name], HALF, [QUANTISED[1], *INTEGER_TILES]),
    *itertools.product(["cuda_decode"], DTYPES, LARGE_GROUPS),
]


@pytest.mark.rotate(23)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "dtype", "sizes"), SIZES, ids=str)
def test_sizes(kernel, dtype, sizes, architecture):
    if runs_on(kernel, dtype, architecture):
        spilled_bytes(architecture, kernel, dtype, **sizes)


MASKS = {
    "none": None,
    "window": SlidingWindow(9),
    "key range": KeyRange(mx.array([3]), mx.array([200])),
    "tree": Causal() & Tree.from_parents([-1, 0, 0]),
    "bool array": mx.zeros((300,), mx.bool_),
    "additive array": mx.zeros((300,)),
}


def columns_apart(key):
    """Stores `key` column by column. The tensor memory accelerator cannot read such an array."""
    return mx.contiguous(key.swapaxes(2, 3)).swapaxes(2, 3)


OPTIONS = [{}, {"softcap": 5.0, "alibi_slopes": mx.ones(4), "sinks": True}, {"key_layout": columns_apart}]


@pytest.mark.rotate(105, nightly=3)
@pytest.mark.parametrize(("kernel", "dtype", "architecture", "mask"), cases(MASKS))
def test_masks_and_options(kernel, dtype, architecture, mask):
    for options in OPTIONS:
        if mask != "additive array" or dtype == "float32":
            spilled_bytes(architecture, kernel, dtype, dim=128, mask=MASKS[mask], **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_block_maps(architecture):
    for dtype in (mx.bool_, *DTYPES.values()):
        assert spilled_by(architecture, launches.block_map(mx.zeros((64, 64), dtype), "cuda")) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_appending(architecture):
    for dtype, group_size, bits in itertools.product(DTYPES.values(), (32, 64, 128), (4, 8)):
        rows = mx.zeros((1, 1, 1, 128), dtype)
        stored = mx.quantize(rows, group_size=group_size, bits=bits)
        described = launches.append([*stored, *stored], rows, rows, 0, group_size, bits, [True] * 6)
        assert spilled_by(architecture, described) == 0


# Calls that models make: dtype, query heads per key/value head, queries, head_dim, mask and options.
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
    "soft-cap": ("bfloat16", 7, 128, 64, "causal", {"softcap": 50.0}),
    "tree": ("bfloat16", 7, 128, 64, MASKS["tree"], {}),
    "bool array": ("bfloat16", 7, 128, 64, mx.zeros((128, 300), mx.bool_), {}),
    "additive array": ("bfloat16", 7, 128, 64, mx.zeros((128, 300), mx.bfloat16), {}),
    **{
        f"{what} over {bits} bits, {dim}": ("bfloat16", 7, length, dim, "causal", {"bits": bits, "group_size": 64})
        for what, length in (("decode", 1), ("prefill", 128))
        for bits in (4, 8)
        for dim in (64, 128)
    },
}

# Bytes that each thread spills on Hopper with head_dim 64. All other calls of models must spill nothing.
SPILLED = {("tree", "cuda_prefill_hopper"): 56, ("additive array", "cuda_prefill_hopper"): 88}


@pytest.mark.rotate(9)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("model", MODELS)
def test_no_spills_in_what_models_call(model, architecture):
    dtype, group, length, dim, mask, options = MODELS[model]
    many = [name for name in LENGTHS if name.startswith("cuda_prefill")]
    for kernel in ["cuda_decode"] if length <= 16 else many:
        if runs_on(kernel, dtype, architecture, dim):
            sizes = {"dim": dim, "length": length, "heads": 2 * group}
            saves = dtype != "float32" and "bits" not in options and not kernel.endswith("_rounded")
            for how in itertools.product({False, saves}, {False, architecture == "sm_90a"}):
                spilled = spilled_bytes(architecture, kernel, dtype, mask=mask, how=how, **sizes, **options)
                assert spilled <= SPILLED.get((model, kernel), 0)


@pytest.mark.rotate(45)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", ["float32", "input"])
@pytest.mark.parametrize("dim", [40, 128, 256])
def test_gradients(rng, dim, precision, dtype, architecture):
    call = replace(draw_call(rng, heads=4, length=100, key_len=90, dim=dim, dtype=dtype), mask="causal")
    with launches.shared_memory(ARCHITECTURES[architecture], 90 if architecture == "sm_90a" else 0):
        described = metal_backward.described(call, device="cuda", precision=precision)
    spilled = spilled_by(architecture, described)
    assert spilled == 0 or architecture != "sm_90a" or (dim > 128 and dtype == "float32")
