"""Flash attention over quantised KV caches gives mlx-lm's results. It also takes sinks, which mlx-lm refuses there."""

import warnings
from contextlib import ExitStack

import mlx.core as mx
import mlxlm_flash_patch as flash
import numpy as np
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from tests.patch.arms import error, normal, off_and_on
from tests.patch.model_configs import config, random_model
from tests.promises import promise

MASKS = {
    "none": lambda length, offset: None,
    "causal": lambda length, offset: "causal",
    "window": lambda length, offset: base.create_causal_mask(length, offset, window_size=5),
    "bool": lambda length, offset: mx.random.uniform(shape=(length, offset + length), key=mx.random.key(5)) > 0.3,
    "additive": lambda length, offset: mx.random.normal((length, offset + length), key=mx.random.key(6)),
}


def filled(bits=8, group_size=32, dtype=mx.float32):
    """Returns (cache, keys, values) after 40 tokens. There are two heads of 128 elements."""
    cache = QuantizedKVCache(group_size, bits)
    new = [normal(seed, 1, 2, 40, 128, dtype=dtype) for seed in (1, 2)]
    return cache, *cache.update_and_fetch(*new)


def attend(queries, filled, mask=None, **options):
    """Calls mlx-lm's attention with a copy of the queries, because mlx-lm scales them in place."""
    cache, keys, values = filled
    return base.scaled_dot_product_attention(mx.array(queries), keys, values, cache, 0.09, mask, **options)


@promise("attention over quantised caches gives mlx-lm's results")
@pytest.mark.rotate(1, default=13)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("length", [1, 5, 17])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 64), (4, 128), (6, 32), (8, 32), (8, 128)])
def test_mlx_lm_s_numbers(bits, group_size, length, mask):
    if bits == 6:  # quantised without mlx-lm's cache, which allocates too much for 6 bits and these heads
        keys, values = (mx.quantize(normal(seed, 1, 2, 40, 128), group_size, bits) for seed in (1, 2))
        given = QuantizedKVCache(group_size, bits), keys, values
    else:
        given = filled(bits, group_size)
    queries = normal(3, 1, 6, length, 128)
    off, on = off_and_on(lambda: attend(queries, given, mask(length, 40 - length)))
    assert error(on, off) < 1e-4
    assert sum(flash.status().calls.values()) == 1


@pytest.mark.parametrize(
    ("dtype", "of_keys", "roundings"),
    [(mx.float16, mx.float16, 4), (mx.bfloat16, mx.bfloat16, 4), (mx.bfloat16, mx.float32, 1)],
    ids=str,
)
def test_16_bits(dtype, of_keys, roundings):
    """The output has the wider dtype of queries and keys. The bound has one epsilon per rounding in mlx-lm's code."""
    given, queries = filled(dtype=of_keys), normal(3, 1, 6, 9, 128, dtype=dtype)
    off, on = off_and_on(lambda: attend(queries, given, "causal"))
    assert on.dtype == off.dtype
    assert error(on, off) < roundings * mx.finfo(dtype).eps


@pytest.mark.parametrize("length", [1, 12])
@pytest.mark.parametrize("blocks", [0, 2])
def test_sinks(length, blocks):
    """The results equal those of mlx-lm for dequantised keys and values, with which mlx-lm accepts sinks."""
    cache, keys, values = filled()
    floats = [mx.dequantize(*packed, group_size=32, bits=8) for packed in (keys, values)]
    queries, sinks = normal(3, 1, 6, length, 128), normal(4, 6)
    off = base.scaled_dot_product_attention(queries, *floats, None, 0.09, "causal", sinks=sinks)
    with pytest.raises(ValueError, match="sinks"):
        attend(queries, (cache, keys, values), "causal", sinks=sinks)
    with flash.enabled(strict=True), ExitStack() as stack:
        for _ in range(blocks):
            stack.enter_context(flash.observe(lambda attend, *a, **b: attend(*a, **b)))
        mx.eval(on := attend(queries, (cache, keys, values), "causal", sinks=sinks))
    assert error(on, off) < 1e-4


@pytest.mark.parametrize("name", ["bits", "group_size"])
@pytest.mark.parametrize(
    "given", [(8, 4), [8], "8", 8.5, {}, np.array([8]), mx.array([8])], ids=lambda x: type(x).__name__
)
def test_a_cache_whose_bits_are_no_number(name, given):
    """The error is one line that names what is wrong, with MLX's error, which lists signatures, as its cause."""
    cache, keys, values = filled()
    setattr(cache, name, given)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        attend(normal(3, 1, 6, 5, 128), (cache, keys, values))
    with flash.enabled(), pytest.raises(TypeError, match=f"{name} of the KV cache is .*, expected a whole") as error:
        attend(normal(3, 1, 6, 5, 128), (cache, keys, values))
    assert "\n" not in str(error.value)
    assert "incompatible function arguments" in str(error.value.__cause__)
    assert flash.status().fallbacks == {}


@pytest.mark.parametrize("model_type", ["plamo2", "phi3small"])
def test_a_model_that_takes_no_quantised_cache_says_so(model_type, tokens):
    """The model fails with the same error as without the patch. The patch adds a note to the error."""
    heads = {"hidden_size": 128, "hidden_size_per_head": 32}
    model, x = random_model(model_type, {**config(model_type), **heads}), tokens(1, 9)

    def generate():
        caches = make_prompt_cache(model)
        mx.eval(model(x[:, :8], cache=caches))
        maybe_quantize_kv_cache(caches, 0, 32, 8)
        mx.eval(model(x[:, 8:], cache=caches))

    with pytest.raises(TypeError, match="incompatible function arguments"):
        generate()
    with flash.enabled(), pytest.raises(TypeError, match="incompatible function arguments") as error:
        generate()
    assert "takes no quantised KV cache, so run it without" in "".join(error.value.__notes__)


@pytest.mark.parametrize("traced_by", ["grad", "compile"])
def test_traced_calls_fall_back(traced_by):
    """Flash attention has no gradient with a quantised cache, so calls that mx.grad traces fall back.

    Compiled calls fall back, too, because the patch cannot tell whether mx.grad or mx.compile traces a call.
    """
    given, queries = filled(), normal(3, 1, 6, 3, 128)

    def traced():
        transform = {"grad": mx.grad, "compile": mx.compile}[traced_by]
        return transform(lambda queries: attend(queries + 0.0, given, "causal").sum())(queries)

    off = traced()
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="no gradient with a quantised KV cache"):
        on = traced()
    assert mx.array_equal(on, off)
    reason = "traced by mx.grad, mx.vmap or mx.compile: flash attention has no gradient with a quantised KV cache"
    assert flash.status().fallbacks == {reason: 1}


def test_bad_input_is_mlx_lm_s():
    """For bad input, mlx-lm raises its own error. If mlx-lm returns a result instead, the patch warns of a fallback."""
    queries = mx.random.normal((1, 4, 8, 64))
    keys = mx.quantize(mx.random.normal((1, 2, 8, 64)), 64, 8)
    mask = np.tril(np.ones((8, 8), bool))

    def outcome(**options):
        try:
            given = {"scale": 0.1, "mask": None, "group_size": 64, "bits": 8, **options}
            return base.quantized_scaled_dot_product_attention(queries * 1, keys, keys, **given).tolist()
        except Exception as error:
            return repr(error)

    for options in ({"mask": mask}, {"mask": mx.zeros((3, 8))}, {"bits": 4}, {"scale": "no number"}):
        expected = outcome(**options)
        with flash.enabled(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert outcome(**options) == expected
            fallbacks = sum(flash.status().fallbacks.values())
        assert fallbacks == len(caught) == isinstance(expected, list)


def test_three_dimensions():
    cache, keys, values = filled()
    packed = ([array[0] for array in arrays] for arrays in (keys, values))
    with flash.enabled(), pytest.raises(ValueError, match="not enough values"):  # mlx-lm's own error
        attend(normal(3, 6, 5, 128), (cache, *packed))
