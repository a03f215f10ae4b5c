"""Times on this machine decide which kernel runs a GPU call, and whether MLX's fused attention is faster."""

import mlx.core as mx
import pytest
from flashattn_core import contest, decide
from flashattn_core.arguments import lowered
from flashattn_core.masks import SlidingWindow

from tests import launches


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_CHECK", "once")
    monkeypatch.setattr(decide, "_verdicts", {})  # as in a process that has not checked a kernel yet
    return tmp_path


class Clock:
    """Replaces contest.times(), which times the contestants: the kernels of flash attention, and MLX's own attention.

    A contestant's time is the given number of milliseconds per call, or 9 if none is given. A pair of numbers
    gives the time per call of independent calls, and of calls that each depend on the one before. `asked` lists the
    contestants of each contest.
    """

    def __init__(self, **milliseconds):
        both = {name: ms if isinstance(ms, tuple) else (ms, ms) for name, ms in milliseconds.items()}
        self.seconds = {name.replace("__", "@"): [ms / 1000 for ms in each] for name, each in both.items()}
        self.asked = []

    def __call__(self, names):
        self.asked.append(list(names))
        return {name: self.seconds.get(name, [0.009, 0.009]) for name in names}


def call(length=100, key_len=300, dtype=mx.float16, precision="input", dim=64, **options):
    query, key = (mx.zeros((1, heads, rows, dim), dtype) for heads, rows in ((4, length), (2, key_len)))
    return lowered(query, key, key, None, "causal", precision=precision, **options)


def decision(clock, *, device="cuda", check=lambda kernel: "", mlx_is_fused=True, driver="a driver", **how):
    return launches.decision(call(**how), device, times=clock, check=check, mlx_is_fused=mlx_is_fused, driver=driver)[0]


def fails(kernel):
    """Returns a check which this kernel fails and every other kernel passes."""
    return lambda name: "wrong" if name.partition("@")[0] == kernel else ""


# --- Our kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["metal_decode_fast", "metal_decode_split__2", "metal_prefill_tg__1"])
def test_the_fastest_of_metals_kernels_and_tilings_is_taken(kernel):
    got = decision(Clock(**{kernel: 1}), device="metal", length=1, precision="float32")
    assert got.kernel == kernel.replace("__", "@")


def test_all_that_cover_the_call_are_timed_and_no_others():
    clock = Clock()
    decision(clock, device="metal", precision="float32")
    tilings = ["metal_prefill_reg", *(f"metal_prefill_reg@{n}" for n in (1, 2, 3))]
    assert clock.asked == [[*tilings, "metal_prefill_tg", "metal_prefill_tg@1"]]


def test_where_they_are_as_fast_as_each_other_the_tables_first_is_taken():
    assert decision(Clock(), device="metal", length=1, precision="float32").kernel == "metal_decode_parallel"


@pytest.mark.parametrize(
    ("device", "how"),
    [
        ("cuda", {"precision": "float32", "length": 1}),  # the kernel table says which CUDA kernel is fastest
        ("cuda", {"precision": "float32", "length": 100}),
        ("cuda", {"kernel": "cuda_rowwise"}),
        ("metal", {"kernel": "metal_prefill_tg@1"}),
    ],
)
def test_where_there_is_one_choice_nothing_is_timed(device, how):
    got = decision(clock := Clock(), device=device, **how)
    assert clock.asked == []
    assert got.kernel == how.get("kernel", got.kernel)


@pytest.mark.parametrize(
    ("dim", "length", "keys", "mask", "precision", "kernel"),
    [
        (128, 512, 512, "causal", "float32", "cuda_prefill@1"),
        (128, 2048, 2048, "causal", "float32", "cuda_prefill"),
        (128, 4096, 4096, "causal", "float32", "cuda_prefill"),
        (128, 512, 9000, "causal", "float32", "cuda_prefill@1"),
        (128, 1000, 9000, "causal", "float32", "cuda_prefill"),  # the keys of the last blocks are split
        (64, 512, 512, "causal", "input", "cuda_prefill@1"),
        (64, 1024, 1024, "causal", "input", "cuda_prefill@1"),
        (64, 1024, 1024, None, "input", "cuda_prefill"),
        (64, 2048, 2048, "causal", "input", "cuda_prefill"),
        (64, 4096, 4096, SlidingWindow(128), "input", "cuda_prefill@1"),
        (64, 512, 9000, "causal", "input", "cuda_prefill"),
        (
            64,
            512,
            9000,
            mx.ones((512, 9000), mx.bool_),
            "input",
            "cuda_prefill@1",
        ),  # with an array mask, no block's keys are split
        (64, 32, 9000, "causal", "input", "cuda_prefill@1"),
        (64, 2080, 2080, None, "input", "cuda_prefill@1"),  # the last block of each head has 32 rows
        (64, 256, 256, None, "input", "cuda_prefill@1"),  # too few keys to split
        (64, 512, 512, "causal", "float32", "cuda_prefill"),  # for this precision and head_dim there is one tiling
    ],
)
def test_few_blocks_have_fewer_rows_on_hopper(dim, length, keys, mask, precision, kernel):
    """Smaller blocks must be chosen if larger ones leave many of 132 multiprocessors idle, or many rows unused."""
    query, key = (mx.zeros((1, heads, rows, dim), mx.float16) for heads, rows in ((28, length), (4, keys)))
    with launches.shared_memory(227, compute_capability=90):
        got = launches.decision(lowered(query, key, key, None, mask, precision=precision))[0]
    assert got.kernel == kernel


def test_the_fastest_that_fails_its_check_is_replaced_by_the_next():
    clock = Clock(metal_decode_split__1=1, metal_decode_split=2, metal_prefill_tg=3, metal_decode_fast=4)
    got = decision(clock, device="metal", length=1, check=fails("metal_decode_split"))
    assert (got.kernel, got.failed, got.wrong) == ("metal_prefill_tg", ["metal_decode_split"], "")


def test_a_contestant_without_a_time_is_the_last():
    def some(names):
        return {name: [0.001] for name in names if name != "metal_decode_parallel"}

    assert decision(some, device="metal", length=1).kernel == "metal_decode_split"


# --- MLX's own attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mlx", "left"),
    [
        *((90, 0.09), (97, 0.097), (97.08, 0.09708), (97.1, None), (100, None), (120, None)),
        *(((90, 300), 0.09), ((300, 50), 0.05)),  # faster only for independent calls, or only for dependent ones
    ],
)
def test_mlxs_own_is_preferred_where_it_is_faster_by_three_percent(mlx, left):
    got = decision(Clock(mlx=mlx, cuda_prefill=100))
    assert got.kernel == "cuda_prefill"  # flash_attention() runs this, because only the patch leaves calls to MLX
    assert got.left() == (left and (left, 0.1))


def test_it_is_compared_with_the_kernel_that_is_taken():
    clock = Clock(mlx=5, metal_prefill_reg=4)
    assert decision(clock, device="metal").left() is None
    got = decision(clock, device="metal", dim=72, check=fails("metal_prefill_reg"))
    assert got.left() == (0.005, 0.009)


def test_it_is_not_preferred_to_a_kernel_that_nobody_timed():
    got = decision(Clock(mlx=1, cuda_prefill=9), check=fails("cuda_prefill"))
    assert (got.kernel, got.left()) == ("cuda_rowwise", None)


@pytest.mark.parametrize("how", [{"precision": "float32"}, {"mlx_is_fused": False}], ids=str)
def test_where_no_call_is_left_to_it_it_is_not_timed(how):
    metal, cuda = Clock(mlx=1), Clock(mlx=1)
    assert decision(metal, device="metal", **how).left() is decision(cuda, **how).left() is None
    assert [contest.MLX in names for names in metal.asked] == [False]
    assert cuda.asked == []


def test_never(monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "never")
    clock = Clock(mlx=1)
    assert decision(clock, device="metal", length=1).kernel == "metal_decode_parallel"
    assert decision(clock).left() is None
    assert clock.asked == []


# --- No memory, interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_without_memory_to_time_anything_the_table_decides(device):
    times = decision(lambda names: {}, device=device)
    assert (times.kernel, times.left()) == ({"metal": "metal_prefill_reg", "cuda": "cuda_prefill"}[device], None)


def test_an_interrupt_leaves_nothing_and_the_next_call_is_timed(cache):
    def interrupted(names):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decision(interrupted)
    assert not (cache / "timed").exists()
    assert decision(Clock(mlx=1)).left()


# --- The next process ----------------------------------------------------------------------------------------

TIMED, KEPT = ([["cuda_prefill", "mlx"]], (0.001, 0.002)), ([], (0.001, 0.002))


def asked_and_left(**how):
    """Returns the contestants that are timed, and the times of MLX and of our kernel if MLX is faster.

    Times that earlier calls measured come from disk, as in a new process.
    """
    got = decision(clock := Clock(mlx=1, cuda_prefill=2), **how)
    return clock.asked, got.left()


def test_times_are_kept_for_lengths_like_these():
    assert asked_and_left() == TIMED
    assert asked_and_left() == asked_and_left(length=128) == KEPT
    assert asked_and_left(length=200) == TIMED


def test_another_driver_is_timed():
    assert asked_and_left() == TIMED
    assert asked_and_left(driver="a newer driver") == TIMED


def test_always(monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "always")
    for _ in range(2):
        assert asked_and_left() == TIMED


def test_other_contestants_are_timed():
    """If an update of MLX fuses its attention, the contest must be held again."""
    assert decision(Clock(), device="metal", mlx_is_fused=False).times
    clock = Clock(mlx=1)
    assert decision(clock, device="metal").left()
    assert len(clock.asked) == 1


@pytest.mark.parametrize("damage", [lambda text: text[:-3], lambda text: b"", lambda text: text.replace(b"1", b"2")])
def test_a_broken_file_is_not_believed(cache, damage):
    assert asked_and_left() == TIMED
    [file] = (cache / "timed").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert asked_and_left() == TIMED
