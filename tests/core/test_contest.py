"""flashattn_core.contest times our kernels and MLX's own attention on the same calls. Here it times CPU kernels."""

import gc
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import check, contest
from flashattn_core.arguments import lowered
from flashattn_core.contest import MLX, in_words, times
from flashattn_core.drawn import Kind, drawn
from flashattn_core.masks import Causal, KeyRange, SlidingWindow

CPU = mx.default_stream(mx.cpu)
OURS = "cpu_prefill"


def call(
    length=20,
    key_len=40,
    mask="causal",
    dtype=mx.float32,
    batch=1,
    heads=4,
    kv_heads=2,
    dim=16,
    value_dim=None,
    bits=0,
    **options,
):
    query, key, value = (
        mx.zeros((batch, heads, rows, columns), dtype)
        for heads, rows, columns in (
            (heads, length, dim),
            (kv_heads, key_len, dim),
            (kv_heads, key_len, value_dim or dim),
        )
    )
    if bits:
        options |= {"bits": bits, "group_size": 32}
        key, value = (mx.quantize(x, 32, bits) for x in (key, value))
    return lowered(query, key, value, None, mask, **options)


def test_a_kind_in_words():
    sinks, mask = mx.zeros(4, mx.bfloat16), SlidingWindow(9) & KeyRange(2, 90)
    plain = call(3000, 26000, dtype=mx.bfloat16, dim=128, precision="input")
    assert in_words(plain) == "bfloat16 4/2x128, 4096 x 32768, causal, rounded once"
    given = call(1, 100, mask, mx.bfloat16, batch=3, value_dim=8, sinks=sinks, softcap=5.0, alibi_slopes=mx.zeros(4))
    size = "bfloat16 4/2x16, 8, 1 x 128, batch of 4, window 16"
    assert in_words(given) == f"{size}, alibi_slopes, causal, key_start, key_stop, sinks, softcap"
    stored = call(1, 64, None, mx.float16, dim=64, bits=4)
    assert in_words(stored).startswith("float16 4/2x64, 1 x 64, key_biases, key_scales")
    assert in_words(stored).endswith("4 bits in groups of 32")


def test_lengths_up_to_the_same_power_of_two_are_one_kind():
    """in_words() must round numbers of queries above 64, and numbers of keys, up to powers of two.

    Calls with the same text share their times. Up to 64 queries, each number has its own text.
    """
    words = [in_words(call(length, key_len)) for length, key_len in ((65, 129), (128, 256), (100, 200))]
    assert len(set(words)) == 1
    for other in (call(64, 200), call(63, 200), call(129, 200), call(100, 128), call(100, 257), call(batch=2)):
        assert in_words(other) != words[0]


# --- What is timed ------------------------------------------------------------------------------------------


CALLS = {
    "causal": {},
    "no mask": {"mask": None},
    "a window": {"mask": SlidingWindow(9)},
    "ranges": {"mask": Causal() & KeyRange(2, 30), "batch": 2},
    "sinks": {"sinks": mx.zeros(4)},
    "another value_dim": {"value_dim": 8},
    "no keys": {"key_len": 0},
    "one of each": {"length": 1, "key_len": 1},
    "16 bits": {"dtype": mx.bfloat16, "precision": "input"},
}


@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize("name", CALLS)
def test_each_contestant_has_a_time(name):
    found = times(call(**CALLS[name]), [OURS, MLX], CPU)
    assert found.keys() == {OURS, MLX}
    assert all(0 < seconds < 1 for each in found.values() for seconds in each)


@pytest.mark.parametrize(("given", "ways"), [({}, 2), ({"value_dim": 8}, 1), ({"dim": 64, "bits": 4}, 2)], ids=str)
def test_calls_are_timed_alone_and_one_after_the_other(given, ways):
    """Each contestant has a time for independent calls and, if out has query's shape, a time for a chain of calls.

    In a chain, each call's output is the next call's query.
    """
    [seconds] = times(call(**given), [OURS], CPU).values()
    assert len(seconds) == ways
    assert all(0 < each < 1 for each in seconds)


def test_who_takes_longer_loses(monkeypatch):
    def slow(*args, **kwargs):
        return mx.fast.scaled_dot_product_attention(*args, **kwargs) + mx.random.normal((1000, 1000)).sum()

    monkeypatch.setattr(contest, "mlx_attention", slow)
    found = times(call(), [OURS, MLX], CPU)
    assert sum(found[MLX]) > 2 * sum(found[OURS])


def test_a_contestant_that_raises_is_left_out(monkeypatch):
    def refuses(*args, **kwargs):
        raise ValueError("[scaled_dot_product_attention] no such call")

    monkeypatch.setattr(contest, "mlx_attention", refuses)
    assert times(call(), [OURS, MLX], CPU).keys() == {OURS}
    assert times(call(), ["cpu_decode", OURS], CPU).keys() == {OURS}  # cpu_decode takes up to 8 queries, not 20


@pytest.mark.parametrize("says", ["[malloc] Unable to allocate 9 bytes.", "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"])
def test_without_memory_there_are_no_times(monkeypatch, says):
    def has_none(*args, **kwargs):
        raise RuntimeError(says)

    monkeypatch.setattr(contest, "mlx_attention", has_none)
    assert times(call(), [OURS, MLX], CPU) == {}
    monkeypatch.undo()
    monkeypatch.setattr(contest, "drawn", has_none)
    assert times(call(), [OURS, MLX], CPU) == {}


def test_a_traced_call_is_timed_with_its_gradient(monkeypatch):
    differentiated = []
    monkeypatch.setattr(contest.mx, "vjp", lambda *args, vjp=mx.vjp: differentiated.append(1) or vjp(*args))
    times(call(), [OURS], CPU)
    assert not differentiated
    found, key = [], mx.zeros((1, 2, 40, 16))

    def traced(query):
        found.append(times(lowered(query, key, key, None, "causal"), [OURS, MLX], CPU))
        return query.sum()

    query = mx.zeros((1, 4, 20, 16))
    for transformed in (mx.grad(traced), mx.compile(traced), mx.compile(traced, shapeless=True)):
        mx.eval(transformed(query))
    mx.eval(mx.vmap(traced)(query[None]))
    assert [each.keys() for each in found] == [{OURS, MLX}] * 4
    assert differentiated


def test_in_another_thread():
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: times(call(), [OURS, MLX], mx.new_stream(mx.cpu))).result()
    assert found.keys() == {OURS, MLX}


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        times(call(), [OURS], CPU)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("run", [lambda: times(call(), [OURS, MLX], CPU), lambda: check.of_call(call(), OURS, CPU)])
def test_no_random_numbers_of_the_callers_are_drawn(run):
    mx.random.seed(5)
    expected = mx.random.normal((3,)).tolist()
    mx.random.seed(5)
    run()
    assert mx.random.normal((3,)).tolist() == expected


@pytest.mark.parametrize(
    ("batch", "heads", "length", "key_len"),
    [(1, 32, 131072, 131072), (1, 32, 1, 2**22), (64, 32, 8192, 8192), (4096, 32, 1, 4096), (64, 32, 2**17, 100)],
)
def test_trial_calls_are_bounded(monkeypatch, batch, heads, length, key_len):
    """The work and memory of a trial call must be limited. The test never evaluates the call itself."""
    asked = {}
    monkeypatch.setattr(
        contest, "drawn", lambda kind, length, key_len, **how: asked.update(how, length=length, key_len=key_len)
    )
    contest._trial_call(call(length, key_len, "causal", mx.bfloat16, batch, heads, heads, 128), CPU)
    work = asked["batch"] * heads * asked["length"] * asked["key_len"] * 256
    size = asked["batch"] * heads * (asked["length"] + asked["key_len"]) * 256 * 2
    assert work <= 4e11
    assert size <= 2**29
    assert min(asked["batch"], asked["length"], asked["key_len"]) >= 1


def test_calls_that_are_small_are_timed_as_they_are(monkeypatch):
    asked = {}
    monkeypatch.setattr(contest, "drawn", lambda kind, *lengths, **how: asked.update(how, lengths=lengths))
    contest._trial_call(call(100, 300, SlidingWindow(9), batch=3), CPU)
    assert asked == {"lengths": (100, 300), "batch": 3, "kv_heads": 2, "window": 9, "stream": CPU}


# --- MLX's own attention ------------------------------------------------------------------------------------


MASKS = {
    "none": {},
    "causal": {"causal": None},
    "window": {"causal": None, "window": None},
    "range": {"key_start": mx.int32},
    "range with an end": {"key_start": mx.int32, "key_stop": mx.int32},
    "causal in a range": {"causal": None, "key_start": mx.int32, "key_stop": mx.int32},
    "window and range": {"causal": None, "window": None, "key_start": mx.int32},
    "sinks": {"causal": None, "sinks": mx.float32},
}


@pytest.mark.parametrize(("length", "key_len"), [(1, 60), (40, 40), (70, 100)])
@pytest.mark.parametrize("given", MASKS)
def test_it_computes_what_ours_does(given, length, key_len):
    """MLX's and our results must be equal in rows that see a key. In other rows MLX's results are undefined."""
    kind = Kind(mx.float32, 16, 16, 2, length, MASKS[given])
    trial = drawn(kind, length, key_len)
    arguments = lowered(**trial)
    arrays = (trial["query"], trial["key"], trial["value"])
    ours, theirs = (contest._ways(name, arguments, trial, CPU)[0](1)[0] for name in (OURS, MLX))
    assert ours.shape == theirs.shape == arrays[0].shape
    sees_something = ~mx.all(ours == 0, axis=-1, keepdims=True)
    assert sees_something.sum() > 0
    np.testing.assert_allclose(*(mx.where(sees_something, x, 0) for x in (ours, theirs)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", MASKS)
def test_masks_are_arrays_only_where_mlx_has_no_word_for_them(given):
    """The mask of MLX's function is None, "causal" or an array."""
    mask = contest._mask_for_mlx(drawn(Kind(mx.float32, 16, 16, 2, 40, MASKS[given]), 40, 60))
    words = {"none": None, "causal": "causal", "sinks": "causal"}
    if given in words:
        assert mask == words[given]
    else:
        assert (mask.dtype, mask.shape[-2:]) == (mx.bool_, (40, 60))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"alibi_slopes": mx.zeros(4)},
        {"mask": mx.ones((20, 40), mx.bool_)},
        {"mask": mx.zeros((20, 40))},
        {"dim": 64, "bits": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_mlx_fuses_nowhere_is_not_asked_of_it(monkeypatch, options):
    monkeypatch.setattr(contest, "mlx_attention", lambda *args, **kwargs: pytest.fail("asked"))
    assert not contest.mlx_is_fused(call(**options), CPU)


def test_mlx_is_asked_whether_it_has_a_fused_kernel(monkeypatch):
    asked = []

    def own(query, key, value, *, force_fused, **how):
        asked.append((query.shape, key.shape, query.dtype, force_fused, how["mask"]))

    assert not contest.mlx_is_fused(call(), CPU)  # MLX has no fused kernel on the CPU
    monkeypatch.setattr(contest, "mlx_attention", own)
    assert contest.mlx_is_fused(call(dtype=mx.float16), CPU)
    assert asked == [((1, 4, 20, 16), (1, 2, 40, 16), mx.float16, True, "causal")]
    assert contest.mlx_is_fused(call(mask=SlidingWindow(9)), CPU)
    assert asked[1][-1].shape == (1, 1, 20, 40)
