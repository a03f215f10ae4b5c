"""Calls work under mx.compile and mx.vmap, and on streams.

test_surface_transforms.py tests compile, vmap and checkpoint with drawn calls.
"""

import mlx.core as mx
import pytest
from flashattn_core import flash_attention, reset_stats, stats
from flashattn_core.masks import Causal, SlidingWindow, Tree

from tests.core.oracle import draw
from tests.promises import promise


@pytest.mark.parametrize("form", ["bool", "packed"])
@pytest.mark.parametrize("transform", ["none", "vmap", "grad", "jvp"])
def test_compile_shapeless_follows_the_size_of_a_tree(rng, form, transform):
    def attend(x, tree):
        return flash_attention(x, x, x, mask=Tree(tree) & Causal())

    function = {
        "none": attend,
        "vmap": mx.vmap(attend),
        "grad": lambda x, tree: mx.grad(lambda x: attend(x, tree).square().sum())(x),
        "jvp": lambda x, tree: mx.jvp(lambda x: attend(x, tree), [x], [x])[1][0],
    }[transform]
    compiled = mx.compile(function, shapeless=True)
    for batch, size in [(1, 5), (2, 6), (1, 32), (1, 5), (2, 33), (3, 1), (1, 65)]:
        x = draw(rng, batch=(batch,) if transform != "vmap" else (batch, 2), length=size, key_len=size)[0]
        seen = mx.array(rng.random((batch, size, size)) > 0.5)
        tree = Tree(seen).bits if form == "packed" else seen
        assert mx.allclose(compiled(x, tree), function(x, tree), atol=1e-6)


def total(query, key, value, bias, slopes, sinks):
    options = {"mask": Causal() & bias, "alibi_slopes": slopes, "sinks": sinks, "return_lse": True}
    out, lse = flash_attention(query, key, value, **options)
    return out.square().sum() + mx.logaddexp(lse, mx.array(0.0)).sum()


def gradient(*arrays):
    return mx.grad(total, argnums=range(6))(*arrays)


def tangents(*arrays):
    return mx.jvp(lambda *x: flash_attention(*x[:3], mask=x[3], sinks=x[5]), list(arrays), list(arrays))[1]


def second_derivative(*arrays):
    along = lambda *x: sum((g * a).sum() for g, a in zip(gradient(*x), arrays, strict=True))  # noqa: E731
    return mx.grad(along, argnums=range(6))(*arrays)


@promise("shapeless functions follow every shape, also in derivatives")
@pytest.mark.parametrize("function", [gradient, tangents, second_derivative])
def test_compile_shapeless_follows_all_shapes_in_derivatives(rng, function):
    """MLX's own operations compute most of these derivatives. Heads, head_dim, lengths and batches change."""
    compiled = mx.compile(function, shapeless=True)
    shapes = [(2, 4, 2, 5, 7, 8, 6), (1, 2, 2, 1, 3, 64, 5), (3, 6, 1, 33, 9, 16, 24), (2, 4, 4, 9, 65, 2, 2)]
    for batch, heads, kv_heads, length, key_len, dim, value_dim in [*shapes, shapes[0]]:
        sizes = {"heads": heads, "kv_heads": kv_heads, "length": length, "key_len": key_len, "dim": dim}
        arrays = [*draw(rng, batch=(batch,), value_dim=value_dim, **sizes)]
        numbers = lambda *shape: mx.array(rng.random(shape, dtype="float32"))  # noqa: E731
        arrays += [numbers(1, heads, 1, key_len), numbers(heads), numbers(heads)]
        for got, expected in zip(compiled(*arrays), function(*arrays), strict=True):
            assert got.shape == expected.shape
            assert mx.allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_compile_shapeless_refuses_cotangents_of_other_shapes(rng):
    """The kernels would read them outside of their memory."""
    compiled = mx.compile(
        lambda q, k, v: mx.vjp(flash_attention, [q, k, v], [mx.ones((1, 2, 3, 16))])[1], shapeless=True
    )
    mx.eval(compiled(*draw(rng, length=3, key_len=9)))
    with pytest.raises(ValueError, match=r"the cotangent of out has shape \(1,2,3,16\), expected \(1,2,99,16\)"):
        compiled(*draw(rng, length=99, key_len=9))


def test_compile_merges_equal_calls_and_keeps_different_ones(rng):
    arrays = draw(rng, length=9, key_len=9)
    mask = mx.array(rng.random((9, 9)) > 0.5)
    zeros = mx.array([0.0, 0.0])

    def calls(first, second):
        function = mx.compile(lambda q, k, v: flash_attention(q, k, v, **first) - flash_attention(q, k, v, **second))
        reset_stats()
        mx.eval(function(*arrays))
        return sum(stats().values())

    assert calls({}, {}) == 1
    assert calls({"mask": mask}, {"mask": mask}) == 1
    different = [{"scale": 2.0}, {"softcap": 2.0}, {"mask": "causal"}, {"mask": SlidingWindow(2)}, {"mask": mask}]
    different += [{"kernel": "cpu_prefill"}, {"sinks": zeros}, {"alibi_slopes": zeros}]
    for options in different:
        assert calls({}, options) == 2, options
    assert calls({"sinks": zeros}, {"alibi_slopes": zeros}) == 2
    assert calls({"mask": SlidingWindow(2)}, {"mask": SlidingWindow(3)}) == 2


@promise("a call runs on the stream that it names")
def test_streams(rng):
    arrays = draw(rng, heads=14, kv_heads=2, length=100, key_len=300, dim=64)
    expected = flash_attention(*arrays)
    streams = [mx.new_stream(mx.cpu) for _ in range(4)]
    outs = [flash_attention(*arrays, stream=stream) for stream in streams for _ in range(5)]
    mx.eval(outs)
    assert all(mx.array_equal(out, expected) for out in outs)
    with mx.stream(streams[0]):
        assert mx.array_equal(flash_attention(*arrays), expected)
    assert mx.array_equal(flash_attention(*arrays, stream=mx.cpu), expected)


def test_compile_shapeless_checks_the_new_shapes(rng):
    compiled = mx.compile(lambda q, k, v: flash_attention(q, k, v), shapeless=True)
    mx.eval(compiled(*draw(rng, heads=4, length=9, key_len=9)))
    with pytest.raises(ValueError, match="key has 3 heads, which does not divide query's 4"):
        mx.eval(compiled(*draw(rng, heads=4, kv_heads=3, length=9, key_len=9)))
    mask = mx.arange(33) > 3
    mx.eval(mask)
    compiled = mx.compile(lambda q, k, v: flash_attention(q, k, v, mask=mask), shapeless=True)
    mx.eval(compiled(*draw(rng, length=9, key_len=33)))
    with pytest.raises(ValueError, match=r"mask has shape \(33\), expected one that broadcasts to"):
        mx.eval(compiled(*draw(rng, length=9, key_len=34)))
    compiled = mx.compile(lambda q, k, v, t: flash_attention(q, k, v, mask=Tree(t)), shapeless=True)
    mx.eval(compiled(*draw(rng, length=9, key_len=9), mx.eye(4, dtype=mx.bool_)))
    with pytest.raises(ValueError, match=r"visible has shape \(5,4\), expected \(\*B, T, T\)"):
        mx.eval(compiled(*draw(rng, length=9, key_len=9), mx.eye(5, 4, dtype=mx.bool_)))
    compiled = mx.compile(lambda *x: mx.jvp(lambda *y: flash_attention(*y), x, x)[1], shapeless=True)
    mx.eval(compiled(*draw(rng, length=9, key_len=9)))
    query, key, value = draw(rng, length=9, key_len=9)
    with pytest.raises(ValueError, match="key has head_dim 3, expected query's 16"):
        compiled(query, key[..., :3], value)
    compiled = mx.compile(lambda q, k, v: flash_attention(q, k, v, kernel="cpu_decode"), shapeless=True)
    mx.eval(compiled(*draw(rng, length=8, key_len=33)))
    with pytest.raises(ValueError, match="cpu_decode takes up to 8 queries, found 9"):
        mx.eval(compiled(*draw(rng, length=9, key_len=33)))
