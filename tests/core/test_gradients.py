"""Gradients of query, key, value and sinks: every mask and option, against float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention, reset_stats, stats
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
from gradient_oracle import (
    Call,
    assert_obeys_the_rule,
    draw_call,
    flash_gradients,
    unfused_gradients,
)
from oracle import DTYPES, draw, to_numpy
from test_grid import GROUPS, HEAD_DIMS, PAIRS, cast_arrays, mask_kinds, option_kinds
from test_options import OPTIONS

# Whole and partial tiles of keys (288) and bands of rows (64), and L % 128 == 64.
LONG = [(130, 31), (192, 192), (64, 320), (66, 577), (97, 290)]


def with_options(call: Call, mask, options) -> Call:
    """With mask and options of test_grid.py, in the dtypes that go with query's."""
    dtype = call.query.dtype
    options = {k: v.astype(dtype) if k == "sinks" else v for k, v in options.items()}
    return replace(call, mask=cast_arrays(mask, dtype), **options)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grid(rng, dtype, dim, group):
    """The forward's grid."""
    turn = HEAD_DIMS.index(dim) + 5 * group
    for i, (length, key_len) in enumerate(PAIRS):
        call = draw_call(
            rng, batch=(2,), heads=group, kv_heads=1, length=length, key_len=key_len, dim=dim, dtype=dtype,
            dlse=i % 3 != 0,
        )  # fmt: skip
        mask = mask_kinds(rng, length, key_len)[(turn + i) % 12]()
        assert_obeys_the_rule(with_options(call, mask, option_kinds(rng, group)[(turn + 3 * i) % 8]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_turn", range(12))
def test_beyond_one_tile(rng, mask_turn, dtype):
    for i, (length, key_len) in enumerate(LONG):
        call = draw_call(rng, batch=(2,), heads=2, kv_heads=1, length=length, key_len=key_len, dim=64, dtype=dtype)
        mask = mask_kinds(rng, length, key_len)[mask_turn]()
        assert_obeys_the_rule(with_options(call, mask, option_kinds(rng, 2)[(mask_turn + i) % 8]))


@pytest.mark.parametrize("mask_turn", range(12))
@pytest.mark.parametrize("option_turn", range(8))
def test_each_mask_with_each_option(rng, mask_turn, option_turn):
    for length, key_len in [(1, 65), (5, 97), (33, 97), (97, 33), (70, 320)]:
        call = draw_call(rng, batch=(2,), heads=4, length=length, key_len=key_len, dim=40, value_dim=24)
        mask = mask_kinds(rng, length, key_len)[mask_turn]()
        assert_obeys_the_rule(with_options(call, mask, option_kinds(rng, 4)[option_turn]))


@pytest.mark.parametrize("dims", [(16, 200), (256, 16), (512, 512), (3, 1)], ids=str)
@pytest.mark.parametrize("heads", [(14, 2), (71, 1)], ids=str)
def test_dims_and_heads(rng, heads, dims):
    call = draw_call(
        rng, heads=heads[0], kv_heads=heads[1], length=40, key_len=300, dim=dims[0], value_dim=dims[1]
    )  # fmt: skip
    assert_obeys_the_rule(replace(call, mask="causal"))


@pytest.mark.parametrize(("length", "key_len"), [(1, 130), (8, 33), (65, 97), (130, 31)])
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option(rng, option, mask, length, key_len):
    call = draw_call(rng, heads=4, length=length, key_len=key_len, dim=24, value_dim=17)
    assert_obeys_the_rule(replace(call, mask=mask, **OPTIONS[option]))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("length", [1, 65])
def test_no_option_is_ignored(rng, option, length):
    call = draw_call(rng, heads=4, length=length, key_len=97)
    plain, with_option = (flash_gradients(each).dv for each in (call, replace(call, **OPTIONS[option])))
    assert mx.abs(plain - with_option).max() > 1e-3


@pytest.mark.parametrize("sink", [-1e4, -mx.inf, 1e4])
def test_extreme_sinks(rng, sink):
    assert_obeys_the_rule(replace(draw_call(rng, length=9, key_len=33), sinks=mx.array([sink, 0.0])))


def test_sinks_gradient_is_a_sum_over_many_rows(rng):
    """Added one after the other in float32 it would be off by 4e-5, twice what is allowed."""
    call = draw_call(rng, length=8192, key_len=3, dim=4)
    assert_obeys_the_rule(replace(call, sinks=mx.array([0.5, -0.5])))


@pytest.mark.parametrize("mask_turn", range(12))
@pytest.mark.parametrize("option_turn", range(8))
def test_by_finite_differences(rng, mask_turn, option_turn):
    """The formulas that everything is compared with, and the kernel, against central differences of
    sum(out * dout) + sum(lse * dlse) in float64, an element at a time."""
    call = draw_call(rng, batch=(2,), heads=2, kv_heads=1, length=5, key_len=7, dim=3, value_dim=2)
    options = option_kinds(rng, 2)[option_turn]
    call = replace(call, mask=mask_kinds(rng, 5, 7)[mask_turn](), **options)
    primals = [call.query, call.key, call.value] + ([] if call.sinks is None else [call.sinks])
    inputs = [to_numpy(a).astype(np.float64) for a in primals]
    dout, dlse = to_numpy(call.dout).astype(np.float64), to_numpy(call.dlse).astype(np.float64)

    def loss(arrays):
        out, lse = call.forward_of(*arrays)
        return (out * dout).sum() + np.where(lse == -np.inf, 0, lse * dlse).sum()

    formulas, kernel = unfused_gradients(call, *call.forward()), flash_gradients(call)
    step = 1e-5
    for position, name in enumerate(("dq", "dk", "dv", "dsinks")[: len(inputs)]):
        slopes = np.empty(inputs[position].shape)
        for index in np.ndindex(slopes.shape):
            moved = [[a.copy() for a in inputs] for _ in range(2)]
            moved[0][position][index] += step
            moved[1][position][index] -= step
            slopes[index] = (loss(moved[0]) - loss(moved[1])) / (2 * step)
        np.testing.assert_allclose(getattr(formulas, name), slopes, rtol=0, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(to_numpy(getattr(kernel, name)), slopes, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mask", [KeyRange(5, 5), mx.array(False), KeyRange(0, 10) & KeyRange(20)], ids=str)
@pytest.mark.parametrize("length", [1, 70])
def test_rows_that_see_nothing_have_zero_gradients(rng, mask, length):
    got = flash_gradients(replace(draw_call(rng, length=length, key_len=64), mask=mask, sinks=mx.array([1.0, 2.0])))
    for gradient in (got.dq, got.dk, got.dv, got.dsinks):
        assert (gradient == 0).all()


@pytest.mark.parametrize(("length", "key_len"), [(130, 31), (97, 64), (65, 1)])
def test_more_queries_than_keys(rng, length, key_len):
    call = replace(draw_call(rng, heads=4, length=length, key_len=key_len), mask="causal")
    assert_obeys_the_rule(call)
    assert (flash_gradients(call).dq[:, :, : length - key_len] == 0).all()


@pytest.mark.parametrize(("length", "key_len"), [(5, 0), (0, 5), (0, 0)])
def test_empty(rng, length, key_len):
    call = draw_call(rng, length=length, key_len=key_len, dim=8, value_dim=6)
    got = flash_gradients(call)
    for gradient, array in ((got.dq, call.query), (got.dk, call.key), (got.dv, call.value)):
        assert gradient.shape == array.shape
        assert (gradient == 0).all()


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
class TestAdversarial:
    @pytest.mark.parametrize("scale", [250.0, -250.0])
    def test_scores_of_a_thousand(self, rng, dtype, mask, scale):
        call = replace(draw_call(rng, length=64, key_len=97, dtype=dtype), scale=scale, mask=mask)
        assert np.abs(call.forward()[1]).max() > 1000
        assert_obeys_the_rule(call)

    @pytest.mark.parametrize("length", [1, 4, 8])
    def test_few_queries_with_large_scores(self, rng, dtype, mask, length):
        """The scores must be rounded as they were in the forward pass, whose lse is used."""
        call = draw_call(rng, batch=(8,), heads=21, kv_heads=3, length=length, key_len=97, dim=128, dtype=dtype)
        assert_obeys_the_rule(replace(call, scale=2.0, mask=mask))

    def test_one_dominating_key(self, rng, dtype, mask):
        call = draw_call(rng, length=65, key_len=300, dim=32, dtype=dtype)
        key = call.key * mx.where((mx.arange(300) == 7)[:, None], 100, 1)
        assert_obeys_the_rule(replace(call, key=key.astype(call.key.dtype), mask=mask))

    @pytest.mark.parametrize("sign", [-1, 1])
    def test_lse_beyond_what_exp_can_take(self, rng, dtype, mask, sign):
        # All scores around -120 or 120: exp(-lse) would overflow from lse < -88.7 on.
        call = draw_call(rng, length=192, key_len=192, dim=32, dtype=dtype)
        query, key = mx.abs(call.query) + 0.5, mx.abs(call.key) + 0.5
        call = replace(call, query=sign * query, key=key, scale=4.0, mask=mask)
        lse = call.forward()[1]
        assert (sign * lse > 88.7).mean() > 0.9
        assert_obeys_the_rule(call)

    @pytest.mark.parametrize("shift", [-1000.0, -300.0, 300.0, 1000.0])
    def test_far_from_zero_by_an_additive_mask(self, rng, dtype, mask, shift):
        call = draw_call(rng, length=192, key_len=192, dim=32, dtype=dtype)
        shifted = mx.full((192, 192), shift, call.query.dtype)
        assert_obeys_the_rule(replace(call, mask=Causal() & shifted if mask else shifted))

    @pytest.mark.parametrize("group", [1, 7])
    def test_half_a_tile_of_128(self, rng, dtype, mask, group):
        for length in (64, 192, 320):
            call = draw_call(rng, heads=group, kv_heads=1, length=length, key_len=length, dim=64, dtype=dtype)
            assert_obeys_the_rule(replace(call, mask=mask))


def test_additive_mask_of_the_lowest_float(rng):
    call = draw_call(rng, length=33, key_len=65)
    mask = mx.where(mx.array(rng.random((33, 65)) > 0.5), 0.0, mx.finfo(mx.float32).min)
    assert_obeys_the_rule(replace(call, mask=mask))


@pytest.mark.parametrize("poison", [mx.nan, mx.inf, -mx.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("length", [1, 33, 97])
def test_hidden_nan_reaches_nothing(rng, where, poison, length):
    hidden = mx.arange(97) == 40
    call = replace(draw_call(rng, length=length, key_len=97), mask=~hidden)
    clean = flash_gradients(call)
    got = flash_gradients(replace(call, **{where: mx.where(hidden[:, None], poison, getattr(call, where))}))
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(to_numpy(getattr(got, name)), to_numpy(getattr(clean, name)), rtol=1e-5, atol=1e-6)


def test_nan_in_one_row_reaches_what_that_row_sees(rng):
    call = replace(draw_call(rng, length=33, key_len=33), mask="causal")
    at = (mx.arange(33) == 10)[:, None] & (mx.arange(16) == 3)
    got = flash_gradients(replace(call, dout=mx.where(at, mx.nan, call.dout)))
    for gradient, reached in ((got.dq, [10]), (got.dk, range(11))):
        nan = np.isnan(to_numpy(gradient)).all(axis=(0, 1, 3))
        assert np.flatnonzero(nan).tolist() == list(reached)
        assert not np.isnan(to_numpy(gradient)[:, :, ~nan]).any()
    expected = np.zeros((33, 16), dtype=bool)
    expected[:11, 3] = True
    np.testing.assert_array_equal(np.isnan(to_numpy(got.dv)), np.broadcast_to(expected, got.dv.shape))


@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_in_lse_stays_with_the_keys_that_the_row_sees(rng, where):
    call = replace(draw_call(rng, length=33, key_len=33), mask=SlidingWindow(4))
    getattr(call, where)[:, :, 10, 3] = mx.nan
    got = flash_gradients(call)
    # Of rows that have a NaN in lse, and of the keys that these see.
    rows, keys = ([10], range(7, 11)) if where == "query" else (range(10, 14), range(7, 14))
    for gradient, reached in ((got.dq, rows), (got.dk, keys), (got.dv, keys)):
        nan = np.isnan(to_numpy(gradient)).all(axis=(0, 1, 3))
        assert np.flatnonzero(nan).tolist() == list(reached)
        assert np.isfinite(to_numpy(gradient)[:, :, ~nan]).all()


class TestTransforms:
    def loss(self, *arrays):
        return (flash_attention(*arrays, mask="causal", softcap=5.0) ** 2).sum()

    def test_compile(self, rng):
        arrays = draw(rng, length=33, key_len=65)
        function = mx.grad(self.loss, argnums=(0, 1, 2))
        for a, b in zip(mx.compile(function)(*arrays), function(*arrays), strict=True):
            assert mx.array_equal(a, b)

    def test_compile_shapeless(self, rng):
        loss = lambda *arrays: (flash_attention(*arrays, mask="causal", scale=0.3) ** 2).sum()  # noqa: E731
        function = mx.grad(loss, argnums=(0, 1, 2))
        compiled = mx.compile(function, shapeless=True)
        for lengths in [(33, 65), (70, 300)]:
            arrays = draw(rng, length=lengths[0], key_len=lengths[1])
            for a, b in zip(compiled(*arrays), function(*arrays), strict=True):
                assert mx.array_equal(a, b)

    def test_checkpoint(self, rng):
        arrays = draw(rng, length=33, key_len=65)
        checkpointed = lambda *arrays: mx.checkpoint(self.loss)(*arrays)  # noqa: E731
        for a, b in zip(mx.grad(checkpointed, (0, 1, 2))(*arrays), mx.grad(self.loss, (0, 1, 2))(*arrays), strict=True):
            assert mx.array_equal(a, b)

    def test_vmap(self, rng):
        query, key, value = draw(rng, batch=(3, 2), length=33, key_len=65)
        function = mx.grad(self.loss, argnums=(0, 1, 2))
        whole = function(query, key, value)
        for a, b in zip(mx.vmap(function)(query, key, value), whole, strict=True):
            assert mx.array_equal(a, b)
        shared = mx.vmap(function, in_axes=(0, None, None))(query, key[0], value[0])
        first = function(query[1], key[0], value[0])
        for a, b in zip(shared, first, strict=True):
            assert mx.array_equal(a[1], b)

    @pytest.mark.parametrize("argument", range(3))
    def test_of_one_argument_alone(self, rng, argument):
        arrays = draw(rng, length=33, key_len=65)
        alone = mx.grad(self.loss, argnums=argument)(*arrays)
        assert mx.array_equal(alone, mx.grad(self.loss, argnums=(0, 1, 2))(*arrays)[argument])


@pytest.mark.parametrize("argument", ["mask", "alibi_slopes"])
def test_what_has_no_gradient_says_so(rng, argument):
    query, key, value = draw(rng, length=9, key_len=9)
    given = mx.zeros((9, 9)) if argument == "mask" else mx.ones(2)
    with pytest.raises(ValueError, match="no gradient of masks and alibi_slopes"):
        mx.grad(lambda x: flash_attention(query, key, value, **{argument: x}).sum())(given)


def test_second_derivatives_say_that_they_are_not_there(rng):
    query, key, value = draw(rng, length=9, key_len=9)
    once = mx.grad(lambda q: flash_attention(q, key, value).sum())
    with pytest.raises(ValueError, match="second derivatives"):
        mx.grad(lambda q: once(q).sum())(query)


def test_is_counted(rng):
    query, key, value = draw(rng, length=9, key_len=9)
    reset_stats()
    mx.eval(mx.grad(lambda q: flash_attention(q, key, value).sum())(query))
    assert {name: calls for name, calls in stats().items() if calls} == {"cpu_prefill": 1, "cpu_backward": 1}


def test_same_bits_for_any_number_of_threads(run_python):
    code = """
import mlx.core as mx, hashlib, numpy as np
mx.set_default_device(mx.cpu)
from flashattn_core import flash_attention
from flashattn_core.masks import SlidingWindow
mx.random.seed(0)
q, k, v = mx.random.normal((2, 7, 700, 40)), mx.random.normal((2, 1, 1500, 40)), mx.random.normal((2, 1, 1500, 24))
for mask in (None, "causal", SlidingWindow(400)):
    g = mx.grad(lambda *a: (flash_attention(*a, mask=mask) ** 2).sum(), (0, 1, 2))(q, k, v)
    print([hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:12] for x in g])
"""
    outputs = {n: run_python(code, FLASHATTN_NUM_THREADS=str(n)) for n in (1, 2, 3, 7)}
    assert all(done.returncode == 0 for done in outputs.values()), outputs[1].stderr
    assert len({done.stdout for done in outputs.values()}) == 1


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_each_instruction_set(run_python, isa):
    code = """
import numpy as np
from dataclasses import replace
from gradient_oracle import assert_obeys_the_rule, draw_call
for length, key_len, dim in ((65, 300, 40), (33, 33, 64), (1, 600, 5)):
    rng = np.random.default_rng(length)
    call = draw_call(rng, heads=7, kv_heads=1, length=length, key_len=key_len, dim=dim)
    assert_obeys_the_rule(replace(call, mask="causal", softcap=4.0))
print("done")
"""
    done = run_python(code, FLASHATTN_CPU_ISA=isa)
    if "expected one that this machine runs" in done.stderr:
        pytest.skip(f"this machine has no {isa}")
    assert done.stdout == "done\n", done.stderr


def test_memory_is_linear(rng):
    # Far below one head's L x S scores, 64 MB.
    query, key, value = draw(rng, heads=4, kv_heads=2, length=4096, key_len=4096, dim=32)
    mx.eval(query, key, value)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(lambda *a: flash_attention(*a, mask=SlidingWindow(900)).sum(), (0, 1, 2))(query, key, value))
    assert mx.get_peak_memory() - before < 24 * 2**20
