"""Gradients of query, key, value and sinks: every mask and option, against float64."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention, reset_stats, stats
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree
from oracle import draw, reference_gradients, to_numpy, unfused
from test_grid import cast_arrays, mask_kinds, option_kinds

LENGTHS = [
    (1, 1),
    (1, 300),
    (7, 33),
    (33, 33),
    (63, 65),
    (64, 64),
    (65, 63),
    (97, 290),
    (130, 31),
    (192, 192),
    (66, 577),
]


def cotangents(rng, query, value):
    shape = (*query.shape[:-1], value.shape[-1])
    out = mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(query.dtype)
    return out, mx.array(rng.standard_normal(shape[:-1], dtype=np.float32))


def gradients(attention, query, key, value, out_gradient, lse_gradient, sinks=None, **options):
    """By mx.vjp: of query, key, value, and of sinks where there are any."""
    primals = [query, key, value] + ([] if sinks is None else [sinks])

    def call(query, key, value, *sinks):
        return attention(query, key, value, **options, **({"sinks": sinks[0]} if sinks else {}))

    return mx.vjp(call, primals, [out_gradient, lse_gradient])[1]


def flash(*args, **options):
    return list(flash_attention(*args, return_lse=True, **options))


def plain(*args, **options):
    return list(unfused(*args, **options))


def by_rounding(dtype):
    """The gradient's formulas in a dtype: each step's result is rounded to it."""
    return lambda a: to_numpy(mx.array(a.astype(np.float32)).astype(dtype)).astype(np.float64)


def assert_gradients(rng, query, key, value, **options):
    """The rule of oracle.py. Unfused gradients are MLX's own, and, as those are NaN beside hidden rows, the formulas
    with each step rounded to the dtype: whichever is further off."""
    incoming = cotangents(rng, query, value)
    got = gradients(flash, query, key, value, *incoming, **options)
    expected = reference_gradients(query, key, value, *incoming, **options)
    primals = [query, key, value, options.get("sinks")]
    for i, name in enumerate(("query", "key", "value", "sinks")[: len(got)]):
        assert got[i].shape == primals[i].shape
        assert got[i].dtype == primals[i].dtype
        error = np.abs(to_numpy(got[i]) - expected[i]).max(initial=0)
        if not error <= 1e-5:  # the unfused ones are slow: only where they decide
            of_mlx = to_numpy(gradients(plain, query, key, value, *incoming, **options)[i])
            of_formulas = reference_gradients(
                query, key, value, *incoming, rounded=by_rounding(query.dtype), **options
            )[i]
            unfused_errors = [np.abs(a - expected[i]).max() for a in (of_mlx, of_formulas)]
            allowed = 2 * np.nanmax(unfused_errors) + 1e-5
            if name == "sinks" and query.dtype != mx.float32:
                allowed += rounding_of_out(query, key, value, *incoming, **options)
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def rounding_of_out(query, key, value, out_gradient, lse_gradient, *, sinks, **options):
    """What rounding out to 16 bits can do to a sink's gradient, a single sum over all rows, where chance decides how
    much of it shows: half a unit in the last place of each element, times its weight in the sum."""
    out, lse = flash_attention(query, key, value, sinks=sinks, return_lse=True, **options)
    unit = mx.finfo(query.dtype).eps if hasattr(mx.finfo(query.dtype), "eps") else 2.0**-7
    terms = np.abs(to_numpy(out) * to_numpy(out_gradient)).sum(axis=-1)
    weights = np.exp(
        np.minimum(to_numpy(sinks)[:, None] - np.where(np.isfinite(to_numpy(lse)), to_numpy(lse), np.inf), 0)
    )
    return unit / 2 * (terms * weights).sum(axis=(0, -1)).max()


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("dim", [1, 5, 40, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_grid(rng, dtype, dim, group):
    turn = dim + 5 * group
    for i, (length, key_len) in enumerate(LENGTHS):
        query, key, value = draw(
            rng, batch=(2,), heads=group, kv_heads=1, length=length, key_len=key_len, dim=dim, dtype=dtype
        )
        masks = mask_kinds(rng, length, key_len)
        mask = cast_arrays(masks[(turn + i) % len(masks)](), query.dtype)
        options = option_kinds(rng, group)[(turn + 3 * i) % 8]
        options = {k: v.astype(query.dtype) if k == "sinks" else v for k, v in options.items()}
        assert_gradients(rng, query, key, value, mask=mask, **options)


@pytest.mark.parametrize("mask_turn", range(12))
@pytest.mark.parametrize("option_turn", range(8))
def test_each_mask_with_each_option(rng, mask_turn, option_turn):
    for length, key_len in [(1, 65), (33, 97), (97, 33), (70, 320)]:
        query, key, value = draw(rng, batch=(2,), heads=4, length=length, key_len=key_len, dim=40, value_dim=24)
        mask = mask_kinds(rng, length, key_len)[mask_turn]()
        assert_gradients(rng, query, key, value, mask=mask, **option_kinds(rng, 4)[option_turn])


@pytest.mark.parametrize("dims", [(16, 200), (256, 16), (512, 512), (3, 1)], ids=str)
@pytest.mark.parametrize("heads", [(14, 2), (71, 1)], ids=str)
def test_dims_and_heads(rng, heads, dims):
    query, key, value = draw(
        rng, heads=heads[0], kv_heads=heads[1], length=40, key_len=300, dim=dims[0], value_dim=dims[1]
    )
    assert_gradients(rng, query, key, value, mask="causal")


def test_by_finite_differences(rng):
    query, key, value = draw(rng, batch=(), heads=2, kv_heads=1, length=3, key_len=5, dim=4)
    sinks = mx.array([0.3, -0.2])
    incoming = cotangents(rng, query, value)
    options = {"mask": "causal", "softcap": 3.0, "scale": 0.6}
    got = gradients(flash, query, key, value, *incoming, sinks=sinks, **options)
    primals = [query, key, value, sinks]

    def total(primals):
        out, lse = flash_attention(*primals[:3], sinks=primals[3], return_lse=True, **options)
        return (to_numpy(out).astype(np.float64) * to_numpy(incoming[0])).sum() + (
            to_numpy(lse).astype(np.float64) * to_numpy(incoming[1])
        ).sum()

    step = 1e-2
    for i, primal in enumerate(primals):
        for index in np.ndindex(primal.shape):
            there, back = (to_numpy(primal).copy() for _ in range(2))
            there[index] += step
            back[index] -= step
            slope = (total([*primals[:i], mx.array(there), *primals[i + 1 :]])
                     - total([*primals[:i], mx.array(back), *primals[i + 1 :]])) / (2 * step)  # fmt: skip
            assert abs(slope - to_numpy(got[i])[index]) < 2e-3


@pytest.mark.parametrize("mask", [KeyRange(5, 5), mx.array(False), KeyRange(0, 10) & KeyRange(20)], ids=str)
@pytest.mark.parametrize("length", [1, 70])
def test_rows_that_see_nothing_have_zero_gradients(rng, mask, length):
    query, key, value = draw(rng, length=length, key_len=64)
    incoming = cotangents(rng, query, value)
    for gradient in gradients(flash, query, key, value, *incoming, mask=mask, sinks=mx.array([1.0, 2.0])):
        assert (gradient == 0).all()


@pytest.mark.parametrize(("length", "key_len"), [(130, 31), (97, 64), (65, 1)])
def test_more_queries_than_keys(rng, length, key_len):
    query, key, value = draw(rng, heads=4, length=length, key_len=key_len)
    assert_gradients(rng, query, key, value, mask="causal")
    incoming = cotangents(rng, query, value)
    assert (gradients(flash, query, key, value, *incoming, mask="causal")[0][:, :, : length - key_len] == 0).all()


@pytest.mark.parametrize(("length", "key_len"), [(5, 0), (0, 5)])
def test_empty(length, key_len):
    arrays = mx.ones((1, 2, length, 8)), mx.ones((1, 2, key_len, 8)), mx.ones((1, 2, key_len, 6))
    incoming = mx.ones((1, 2, length, 6)), mx.ones((1, 2, length))
    for gradient, array in zip(gradients(flash, *arrays, *incoming), arrays, strict=True):
        assert gradient.shape == array.shape
        assert (gradient == 0).all()


class TestAdversarial:
    def test_scores_of_a_thousand(self, rng):
        query, key, value = draw(rng, length=64, key_len=97, dim=32)
        assert_gradients(rng, query * 30, key * 30, value, scale=1.0, mask="causal")

    def test_one_dominating_key(self, rng):
        query, key, value = draw(rng, length=65, key_len=300, dim=32)
        key[:, :, 7] = 40 * key[:, :, 7]
        assert_gradients(rng, query, key, value)

    @pytest.mark.parametrize("shift", [-300.0, 300.0])
    def test_lse_beyond_what_exp_can_take(self, rng, shift):
        # exp(-lse) would overflow from lse < -88.7 on.
        query, key, value = draw(rng, length=192, key_len=192, dim=32)
        assert_gradients(rng, query, key, value, mask=Causal() & mx.full((192, 192), shift))

    def test_additive_mask_of_the_lowest_float(self, rng):
        query, key, value = draw(rng, length=33, key_len=65)
        mask = mx.where(mx.array(rng.random((33, 65)) > 0.5), 0.0, mx.finfo(mx.float32).min)
        assert_gradients(rng, query, key, value, mask=mask)


@pytest.mark.parametrize("poison", [mx.nan, mx.inf, -mx.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("length", [1, 33, 97])
def test_hidden_nan_reaches_nothing(rng, where, poison, length):
    query, key, value = draw(rng, length=length, key_len=97)
    incoming = cotangents(rng, query, value)
    hidden = (mx.arange(97) == 40)[:, None]
    poisoned = {"key": key, "value": value}
    poisoned[where] = mx.where(hidden, poison, poisoned[where])
    clean = gradients(flash, query, key, value, *incoming, mask=~hidden[:, 0])
    got = gradients(flash, query, poisoned["key"], poisoned["value"], *incoming, mask=~hidden[:, 0])
    for a, b in zip(got, clean, strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-5, atol=1e-6)


def test_nan_in_one_row_reaches_what_that_row_sees(rng):
    query, key, value = draw(rng, length=33, key_len=33)
    out_gradient, lse_gradient = cotangents(rng, query, value)
    out_gradient[:, :, 10, 3] = mx.nan
    of_query, of_key, of_value = gradients(flash, query, key, value, out_gradient, lse_gradient, mask="causal")
    for gradient, reached in ((of_query, [10]), (of_key, range(11))):
        nan = np.isnan(to_numpy(gradient)).all(axis=(0, 1, 3))
        assert np.flatnonzero(nan).tolist() == list(reached)
        assert not np.isnan(to_numpy(gradient)[:, :, ~nan]).any()
    expected = np.zeros((33, 16), dtype=bool)
    expected[:11, 3] = True
    np.testing.assert_array_equal(np.isnan(to_numpy(of_value)), np.broadcast_to(expected, of_value.shape))


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

    def test_strided_and_broadcast(self, rng):
        query, key, value = draw(rng, batch=(2,), heads=4, kv_heads=2, length=33, key_len=65)
        rows = lambda a: mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)  # noqa: E731
        for a, b in zip(
            mx.grad(self.loss, (0, 1, 2))(rows(query), mx.repeat(key, 3, -1)[..., ::3], rows(value)),
            mx.grad(self.loss, (0, 1, 2))(query, key, value),
            strict=True,
        ):
            np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-5, atol=1e-6)
        out_gradient = mx.broadcast_to(mx.array(1.0), (2, 4, 33, 16))
        (of_query,) = mx.vjp(lambda q: flash_attention(q, key, value), [query], [out_gradient])[1]
        expected = mx.grad(lambda q: flash_attention(q, key, value).sum())(query)
        assert mx.array_equal(of_query, expected)


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
import mlx.core as mx, numpy as np, test_gradients
for length, key_len, dim in ((65, 300, 40), (33, 33, 64), (1, 600, 5)):
    rng = np.random.default_rng(length)
    q, k, v = test_gradients.draw(rng, heads=7, kv_heads=1, length=length, key_len=key_len, dim=dim)
    test_gradients.assert_gradients(rng, q, k, v, mask="causal", softcap=4.0)
print("done")
"""
    done = run_python(code, FLASHATTN_CPU_ISA=isa)
    if "expected one that this machine runs" in done.stderr:
        pytest.skip(f"this machine has no {isa}")
    assert done.stdout == "done\n", done.stderr


def test_tree(rng):
    query, key, value = draw(rng, heads=4, length=6, key_len=70)
    assert_gradients(rng, query, key, value, mask=Tree.from_parents([-1, 0, 0, 1, 1, -1]))


def test_memory_is_linear(rng):
    # Far below one head's L x S scores, 64 MB.
    query, key, value = draw(rng, heads=4, kv_heads=2, length=4096, key_len=4096, dim=32)
    mx.eval(query, key, value)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(lambda *a: flash_attention(*a, mask=SlidingWindow(900)).sum(), (0, 1, 2))(query, key, value))
    assert mx.get_peak_memory() - before < 24 * 2**20
