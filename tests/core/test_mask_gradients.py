"""Gradients of additive masks and ALiBi slopes agree with float64. Masks that only hide have gradients of zero."""

from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core import NoKernelError, flash_attention, quantized_flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

from tests.core.gradient_oracle import Call, Gradients, assert_obeys_the_rule, draw_call
from tests.core.oracle import DTYPES, draw
from tests.core.test_quantised import normal
from tests.memory import peak_beyond
from tests.promises import promise

SHAPES = [(33, 65), (65,), (1,), (2, 4, 33, 65), (2, 1, 33, 1), (4, 1, 65), (1, 4, 1, 1)]


def partly_hidden(rng, bias):
    """Sets some elements of the bias to -inf, but keeps a bias of one element, because -inf would hide every key."""
    return mx.where(mx.array(rng.random(bias.shape) > 0.8), -mx.inf, bias) if bias.size > 1 else bias


def mask_gradients(call: Call, others, bias):
    """The gradients of bias and slopes in the call with the mask `others & bias`. `others`: other masks, or None."""

    def results(bias, slopes=None):
        options = {"softcap": call.softcap, "sinks": call.sinks, "alibi_slopes": slopes}
        mask = bias if others is None else others & bias
        return flash_attention(call.query, call.key, call.value, call.scale, mask, **options, return_lse=True)

    primals = [bias] if call.alibi_slopes is None else [bias, call.alibi_slopes]
    of_bias, *of_slopes = mx.vjp(results, primals, [call.dout, call.dlse])[1]
    return Gradients(None, None, None, None, *(of_slopes or [None]), of_bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_additive_mask(rng, shape, dtype):
    """The gradient must be summed over the axes along which the mask is broadcast."""
    call = draw_call(rng, batch=(2,), heads=4, kv_heads=2, length=33, key_len=65, value_dim=24, dtype=dtype)
    bias = partly_hidden(rng, normal(rng, *shape, dtype=DTYPES[dtype]))
    got = mask_gradients(call, None, bias)
    assert got.dbias.dtype == bias.dtype
    assert_obeys_the_rule(replace(call, mask=bias), got)


@promise("additive masks and ALiBi slopes have gradients")
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (SlidingWindow(17), {}),
        (KeyRange(mx.array([0, 9]), mx.array([50, 65])), {}),
        (Tree.from_parents([-1, 0, 0, 1, 1]), {}),
        (Causal() & (mx.arange(65) % 3 > 0), {}),
        (Causal(), {"softcap": 2.0}),
        (Causal(), {"sinks": mx.array([-1.0, 0.0, 1.0, 50.0])}),
        (None, {"scale": -1.5}),
    ],
    ids=["window", "range", "tree", "bool", "softcap", "sinks", "scale"],
)
@pytest.mark.parametrize("length", [1, 33])
def test_additive_mask_and_slopes_beside_each_mask_and_option(rng, mask, options, length):
    call = draw_call(rng, batch=(2,), heads=4, kv_heads=2, length=length, key_len=65)
    call = replace(call, alibi_slopes=normal(rng, 4), **options)
    bias = partly_hidden(rng, normal(rng, 2, 1, length, 65))
    got = mask_gradients(call, mask, bias)
    assert got.dslopes is not None
    assert_obeys_the_rule(replace(call, mask=bias if mask is None else mask & bias), got)


MASKS_THAT_HIDE = {
    "bool": (lambda m: m, mx.arange(9) % 2 > 0),
    "whole numbers added": (lambda m: m, mx.arange(9)),
    "range": (lambda m: Causal() & KeyRange(m), mx.array([1], mx.int32)),
    "tree": (lambda m: Tree(m), mx.array([[1], [3], [5]], mx.uint32)),
}


@promise("masks that only hide have gradients of zero")
@pytest.mark.parametrize("kind", MASKS_THAT_HIDE)
def test_what_only_hides_has_zeros(rng, kind):
    of, given = MASKS_THAT_HIDE[kind]
    query, key, value = draw(rng, length=9, key_len=9)
    _, (gradient,) = mx.vjp(lambda m: flash_attention(query, key, value, mask=of(m)), [given], [query])
    assert gradient.shape == given.shape
    if kind != "whole numbers added":  # MLX's conversion to floats computes this gradient
        assert gradient.dtype == given.dtype
        assert not gradient.any()


@promise("checkpointed functions may take masks as arguments")
@pytest.mark.parametrize("kind", [*MASKS_THAT_HIDE, "additive"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_checkpoints_take_masks_as_arguments(rng, kind, compiled):
    """`mlx_lm.lora --grad-checkpoint` passes masks to checkpointed functions."""
    of, given = MASKS_THAT_HIDE.get(kind, (lambda m: m, normal(rng, 9, 9)))
    x = draw(rng, length=9, key_len=9)[0]

    def attend(x, m):
        return flash_attention(x, x, x, mask=of(m))

    checkpointed = mx.grad(lambda x, m: mx.checkpoint(attend)(x, m).square().sum())
    if compiled:
        checkpointed = mx.compile(checkpointed)
    assert mx.array_equal(checkpointed(x, given), mx.grad(lambda x: attend(x, given).square().sum())(x))


@promise("a mask's gradient that nobody evaluates takes no memory")
def test_a_gradient_that_nobody_evaluates_takes_no_memory(rng):
    x, mask = draw(rng, heads=8, kv_heads=8, length=1024, key_len=1024)[0], normal(rng, 1024, 1024)
    attend = mx.checkpoint(lambda x, m: flash_attention(x, x, x, mask=m))
    mx.eval(x, mask)
    peak = peak_beyond(lambda: mx.grad(lambda x: attend(x, mask).sum())(x))
    assert peak < 8 * 1024 * 1024 * 4  # the scores of all heads would take this much


@pytest.mark.parametrize("poison", [mx.nan, mx.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_hidden_nan_reaches_nothing(rng, where, poison):
    """NaN in keys that no query sees, and in queries that see nothing, must change no gradient."""
    call = draw_call(rng, batch=(2,), heads=4, kv_heads=2, length=9, key_len=12)
    call = replace(call, alibi_slopes=normal(rng, 4), sinks=mx.array([1e4, 0.0, -1e4, 1.0]))
    seen = (mx.arange(9)[:, None] > 2) & (mx.arange(12) > 3)
    hidden = mx.arange(9) <= 2 if where == "query" else mx.arange(12) <= 3
    poisoned = replace(call, **{where: mx.where(hidden[:, None], poison, getattr(call, where))})
    bias = mx.where(seen, normal(rng, 9, 12), -mx.inf)
    clean, got = mask_gradients(call, None, bias), mask_gradients(poisoned, None, bias)
    assert mx.array_equal(got.dbias, clean.dbias)
    assert mx.array_equal(got.dslopes, clean.dslopes)
    assert (mx.where(seen, 0, got.dbias) == 0).all()


def test_with_quantised_keys_and_values(rng):
    """mx.grad must compute the gradient of an additive mask, but raise if it is asked for the gradient of query."""
    query, key, value = draw(rng, heads=4, kv_heads=2, length=5, key_len=7, dim=64)
    packed = [mx.quantize(x, 64, 4) for x in (key, value)]
    plain = [mx.dequantize(*x, group_size=64, bits=4) for x in packed]
    bias = normal(rng, 5, 7)
    got = mx.grad(lambda m: quantized_flash_attention(query, *packed, bits=4, mask=m).square().sum())(bias)
    expected = mx.grad(lambda m: flash_attention(query, *plain, mask=m).square().sum())(bias)
    assert mx.allclose(got, expected, atol=1e-5)
    total = lambda q, m: quantized_flash_attention(q, *packed, bits=4, mask=m).sum()  # noqa: E731
    _, (zeros,) = mx.vjp(lambda m: total(query, m), [bias > 0], [mx.array(1.0)])
    assert not zeros.any()
    with pytest.raises(NoKernelError, match="no kernel computes the gradient with quantised keys and values"):
        mx.grad(total)(query, bias > 0)
