"""choose() says which kernel computes a call on a device, and whether MLX's own attention is faster.

plan() says so to people, and backends() describes the devices.
"""

from unittest.mock import Mock

import flashattn_core
import mlx.core as mx
import pytest
from flashattn_core import NoKernelError, _ext, backends, plan
from flashattn_core.arguments import lowered
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

from tests.core.oracle import draw
from tests.gpu_calls import lowered_call, while_traced
from tests.promises import promise

H100, A100, METAL = _ext.Device("cuda", 90), _ext.Device("cuda", 80), _ext.Device("metal")


def call(length=100, keys=300, mask="causal", dtype=mx.bfloat16, dim=64, **options):
    sizes = {"length": length, "keys": keys, "mask": mask, "dtype": dtype, "dim": dim}
    return lowered_call(**sizes, **{"precision": "input", **options}).call


# --- Our estimate and MLX's ---------------------------------------------------------------------------------


def test_the_pairs_of_a_causal_call():
    choice = _ext.choose(call(3, 5), A100)
    assert choice.ours.pairs == choice.mlx.pairs == 4 * (3 + 4 + 5)
    assert (choice.ours.cost, choice.ours.source, choice.mlx.cost) == (1.5, "never measured", 1)


def test_a_kernel_computes_the_pairs_that_its_window_shows_and_mlx_all():
    choice = _ext.choose(call(100, 300, SlidingWindow(7)), METAL)
    assert (choice.ours.pairs, choice.mlx.pairs) == (4 * 100 * 7, 4 * 100 * 300)


PLAIN = {"causal": {}, "no mask": {"mask": None}, "one query": {"length": 1}, "sinks": {"sinks": mx.zeros(4)}}
OURS = {
    "window": {"mask": SlidingWindow(9)},
    "padding": {"length": 300, "mask": Causal() & KeyRange(mx.array([3]))},
    "soft-cap": {"softcap": 5.0},
    "slopes": {"alibi_slopes": mx.zeros(4)},
    "a tree": {"mask": Tree(mx.ones((3, 3), mx.bool_))},
    "an array": {"mask": mx.ones((100, 300), mx.bool_)},
    "a wide head": {"dim": 320},
    "precision": {"precision": "float32"},
    "quantised keys": {"bits": 8, "group_size": 64},
}


@pytest.mark.parametrize("device", [A100, METAL], ids=["cuda", "metal"])
class TestAGpuThatNobodyHasMeasured:
    @pytest.mark.parametrize("how", PLAIN)
    def test_plain_calls_are_left_to_mlx(self, device, how):
        assert _ext.choose(call(**PLAIN[how]), device).is_left

    @promise("a call is left to MLX only if MLX's fused kernel is estimated to be faster")
    @pytest.mark.parametrize("how", OURS)
    def test_all_else_is_ours(self, device, how):
        assert not _ext.choose(call(**OURS[how]), device).is_left

    def test_a_kernel_by_name_is_ours(self, device):
        kernel = _ext.choose(call(), device).variant.kernel
        assert not _ext.choose(call(), device, kernel).is_left


@pytest.mark.parametrize("how", PLAIN)
def test_on_an_h100_no_kernel_is_slower_than_mlxs_own(how):
    choice = _ext.choose(call(**PLAIN[how]), H100)
    assert not choice.is_left
    assert choice.ours.source == "H100 80GB HBM3, measure_cuda_table.py"


@pytest.mark.parametrize(("device", "length", "left"), [(A100, 128, True), (A100, 100, False), (METAL, 128, False)])
def test_a_traced_call_is_compared_with_its_gradient(device, length, left):
    """Under mx.grad, MLX's own attention is fused only on CUDA, for multiples of 128 queries."""
    choice = while_traced(lambda asked: _ext.choose(asked.call, device), length=length, precision="input")
    assert choice.is_left == left


FUSED = {  # what MLX 0.32 has a fused kernel for: on CUDA, on Metal
    "head_dim 64": ({}, True, True),
    "head_dim 72": ({"dim": 72}, True, True),
    "head_dim 100": ({"dim": 100}, False, False),
    "head_dim 256": ({"dim": 256}, False, False),
    "another value_dim": ({"dim": 64, "value_dim": 128}, True, False),
    "float32": ({"dtype": mx.float32}, False, True),
    "float32, one query": ({"dtype": mx.float32, "length": 1}, True, True),
    "one query, head_dim 72": ({"length": 1, "dim": 72}, False, False),
    "one query, a range of keys": ({"length": 1, "mask": KeyRange(3)}, False, True),
    "a range of keys": ({"mask": KeyRange(3)}, False, True),
    "more queries than keys": ({"length": 301}, False, False),
    "eight queries of sixteen heads of a group": ({"length": 8, "heads": 16, "kv_heads": 1}, True, False),
}


@pytest.mark.parametrize("what", FUSED)
def test_what_mlx_fuses(what):
    how, cuda, metal = FUSED[what]
    assert [_ext.choose(call(**how), device).mlx is not None for device in (A100, METAL)] == [cuda, metal]


@pytest.mark.parametrize("shape", [(4, 100, 64), (2, 1, 4, 100, 64)])
def test_mlx_takes_four_dimensions(shape):
    arguments = lowered(*[mx.zeros(shape, mx.bfloat16)] * 3, precision="input")
    assert _ext.choose(arguments.call, A100).mlx is None


# --- Costs that `mlxlm-flash tune` measured -----------------------------------------------------------------

LINE = '{Kernel::cuda_prefill, 80, 0.7, "A100, tuned"},\n'


@promise("measured costs replace the table's")
def test_measured_costs_replace_the_table():
    tuned = _ext.Device("cuda", 80, costs=LINE)
    choice = _ext.choose(call(), tuned)
    assert (choice.ours.cost, choice.ours.source, choice.is_left) == (0.7, "A100, tuned", False)
    assert _ext.choose(call(1), tuned).is_left  # another kernel


@pytest.mark.parametrize("line", ["cuda_prefill 0.7", LINE.replace("0.7", "-1"), LINE.replace("0.7", "nan")])
def test_a_wrong_line_is_refused(line):
    with pytest.raises(ValueError, match="a line of measured costs is '"):
        _ext.Device("cuda", 80, costs=line)


# --- Which kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "length", "keys", "mask", "precision", "small"),
    [
        (128, 512, 512, "causal", "float32", True),
        (128, 2048, 2048, "causal", "float32", False),
        (128, 512, 9000, "causal", "float32", True),
        (128, 1000, 9000, "causal", "float32", False),  # the keys of the last blocks are split
        (64, 512, 512, "causal", "input", True),
        (64, 1024, 1024, "causal", "input", True),
        (64, 1024, 1024, None, "input", False),
        (64, 2048, 2048, "causal", "input", False),
        (64, 4096, 4096, SlidingWindow(128), "input", True),
        (64, 512, 9000, "causal", "input", False),
        (64, 512, 9000, "array", "input", True),  # with an array mask, no block's keys are split
        (64, 32, 9000, "causal", "input", True),
        (64, 2080, 2080, None, "input", True),  # the last block of each head has 32 rows
        (64, 256, 256, None, "input", True),  # too few keys to split
        (64, 512, 512, "causal", "float32", False),  # for this precision and head_dim there is one size
    ],
)
def test_few_blocks_have_fewer_rows_on_hopper(dim, length, keys, mask, precision, small):
    """Smaller blocks must be chosen if larger ones leave many of 132 multiprocessors idle, or many rows unused."""
    if mask == "array":
        mask = mx.ones((length, keys), mx.bool_)
    asked = call(length, keys, mask, mx.float16, dim, heads=28, kv_heads=4, precision=precision)
    assert _ext.choose(asked, H100).variant.small_blocks == small


def test_plan_says_both_estimates(rng):
    arrays = draw(rng, heads=4, kv_heads=2, length=100, key_len=300, dim=64, dtype="bfloat16")
    answer = plan(*arrays, mask="causal", device="metal", precision="input")
    assert (answer.ours.pairs, answer.ours.cost, answer.ours.source) == (answer.mlx.pairs, 1.5, "never measured")
    assert answer.is_left
    assert str(answer).endswith(
        "; estimates: 1e+05 pairs x 1.5, never measured; MLX's own: 1e+05 pairs; the patch leaves it to MLX"
    )
    assert "MLX's own is not fused" in str(plan(*arrays, softcap=5.0, device="metal"))
    answer = plan(*arrays, device="cpu")
    assert (answer.ours, answer.mlx, answer.is_left) == (None, None, False)


# --- What people are told -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "key_len", "dim", "kernel"),
    [
        (1, 1, 64, "metal_decode_fast"),
        (1, 128, 512, "metal_decode_fast"),
        (1, 129, 64, "metal_decode_parallel"),
        (1, 1024, 512, "metal_decode_parallel"),
        (1, 1025, 64, "metal_decode_split"),
        (8, 5000, 512, "metal_decode_split"),
        (9, 9, 64, "metal_prefill_tg"),
        (64, 5000, 256, "metal_prefill_tg"),
        (65, 65, 256, "metal_prefill_reg"),
        (65, 65, 257, "metal_rowwise"),
        (16, 70, 512, "cuda_decode"),
        (17, 70, 256, "cuda_prefill"),
        (17, 70, 257, "cuda_rowwise"),
    ],
)
def test_a_gpu_can_be_asked_about_anywhere(rng, length, key_len, dim, kernel):
    query, key, value = draw(rng, length=length, key_len=key_len, dim=dim)
    device = kernel.split("_")[0]
    answer = plan(query, key, value, device=device)
    assert answer.kernel == kernel
    assert f"{kernel}, precision float32 (" in str(answer)
    assert plan(query, key, value, device=device, kernel=kernel).reason == "the call names this kernel"


@promise("plan() names the precision that a call gets")
@pytest.mark.parametrize(
    ("device", "length", "dtype", "bits", "rounds"),
    [
        ("cuda", 100, "bfloat16", 0, True),
        ("cuda", 100, "float16", 0, True),
        ("cuda", 100, "float32", 0, False),
        ("cuda", 100, "bfloat16", 4, True),
        ("cuda", 1, "bfloat16", 0, False),
        ("metal", 100, "bfloat16", 0, False),
        ("cpu", 100, "bfloat16", 0, False),
    ],
)
def test_which_precision_a_call_gets(rng, device, length, dtype, bits, rounds):
    """plan() must say whether probabilities are rounded to the inputs' precision."""
    query, *stored = draw(rng, length=length, key_len=100, dim=64, dtype=dtype)
    stored, how = ([mx.quantize(x, bits=bits) for x in stored], {"bits": bits}) if bits else (stored, {})
    for asked, got in (("input", "input" if rounds else "float32"), ("float32", "float32")):
        answer = plan(query, *stored, device=device, precision=asked, **how)
        assert answer.precision == got
        assert f", precision {got} (" in str(answer)


@pytest.mark.parametrize(
    ("kernel", "device", "dim", "reason"),
    [
        ("cpu_decode", "cpu", 8, "cpu_decode takes up to 8 queries, found 9"),
        ("cpu_prefill", "cuda", 8, "cpu_prefill runs on the CPU, but the stream does not"),
        ("metal_rowwise", "cpu", 8, "metal_rowwise runs on Metal, but the stream does not"),
        ("metal_decode_fast", "metal", 8, "metal_decode_fast takes up to 1 queries, found 9"),
        ("metal_prefill_tg", "metal", 300, "metal_prefill_tg takes a head_dim up to 256, found 300"),
        ("cuda_prefill", "cuda", 257, "cuda_prefill takes a head_dim up to 256, found 257"),
    ],
)
def test_what_a_kernel_by_name_does_not_cover_has_a_reason(rng, kernel, device, dim, reason):
    query, key, value = draw(rng, length=9, key_len=9, dim=dim, dtype="float16")
    answer = plan(query, key, value, kernel=kernel, device=device, precision="input")
    assert (answer.kernel, answer.precision, answer.reason) == (None, "float32", reason)
    assert "no kernel" in str(answer)


@promise("backends() names what CUDA lacks, with the cure")
def test_what_is_missing_of_cuda_stands_there_with_its_cure(monkeypatch, tmp_path):
    """The test imitates MLX's CPU build without and with an NVIDIA GPU, and its CUDA build with and without NVRTC."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(flashattn_core, "_DEVICES", tmp_path)
    assert backends()["cuda"] == "not in this MLX build"
    (tmp_path / "nvidia0").touch()
    cure = "pip install 'flashattn-core[cuda13]', or [cuda12]"
    assert backends()["cuda"] == f"not in this MLX build, though there is an NVIDIA GPU: {cure}"

    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    describe = Mock(
        side_effect=["NVIDIA H100, sm_90a", NoKernelError("[flash_attention] NVRTC is not there: reinstall it")]
    )
    monkeypatch.setattr(flashattn_core._ext, "describe_cuda", describe)
    assert backends()["cuda"] == "NVIDIA H100, sm_90a"
    assert backends()["cuda"] == "NVRTC is not there: reinstall it"
