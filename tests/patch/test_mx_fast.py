"""With the patch, mx.fast.scaled_dot_product_attention takes and refuses the same arguments as without the patch."""

import warnings
from contextlib import nullcontext

import mlx.core as mx
import mlxlm_flash_patch as flash
import numpy as np
import pytest
from flashattn_core.masks import Causal
from mlxlm_flash_patch.mx_fast import flash_instead_of

from tests.patch.arms import normal, off_and_on
from tests.promises import promise

Q, K, V = normal(0, 2, 4, 9, 16), normal(1, 2, 2, 9, 16), normal(2, 2, 2, 9, 16)
SEEN = mx.array(np.random.RandomState(0).rand(2, 1, 9, 9) > 0.4) | mx.eye(9).astype(mx.bool_)


def of(dtype, *arrays):
    return [array.astype(dtype) for array in arrays]


# Calls that flash attention computes: (arrays, options)
TAKEN = {
    "no mask": ((Q, K, V), {"scale": 0.25}),
    "causal": ((Q, K, V), {"scale": 0.25, "mask": "causal"}),
    "keywords": ((), {"q": Q, "k": K, "v": V, "scale": 0.25}),
    "keywords behind": ((Q,), {"v": V, "k": K, "scale": 0.25}),
    "a bool mask": ((Q, K, V), {"scale": 0.25, "mask": SEEN}),
    "a bool mask (1, 1, L, S)": ((Q, K, V), {"scale": 0.25, "mask": SEEN[:1]}),
    "a bool mask (L, S)": ((Q, K, V), {"scale": 0.25, "mask": SEEN[0, 0]}),
    "a bool mask (B, 1, 1, S)": ((Q, K, V), {"scale": 0.25, "mask": SEEN[:, :, :1]}),
    "a bool mask (S,)": ((Q, K, V), {"scale": 0.25, "mask": SEEN[0, 0, 0]}),
    "a bool mask (B, H, L, S)": ((Q, K, V), {"scale": 0.25, "mask": mx.broadcast_to(SEEN, (2, 4, 9, 9))}),
    "an additive mask (B, 1, L, S)": ((Q, K, V), {"scale": 0.25, "mask": mx.where(SEEN, 0.0, -1e9)}),
    "the lowest numbers": ((Q, K, V), {"scale": 0.25, "mask": mx.where(SEEN, 0.0, mx.finfo(mx.float32).min)}),
    "an int32 mask": ((Q, K, V), {"scale": 0.25, "mask": mx.where(SEEN, 0, -1000).astype(mx.int32)}),
    "a float16 mask": ((Q, K, V), {"scale": 0.25, "mask": mx.where(SEEN, 0.0, -1000.0).astype(mx.float16)}),
    "16 bits": (of(mx.bfloat16, Q, K, V), {"scale": 0.25}),
    "q and k in float32, v in bfloat16": ((Q, K, *of(mx.bfloat16, V)), {"scale": 0.25}),
    "q in bfloat16, k in float16": ((*of(mx.bfloat16, Q), *of(mx.float16, K), V), {"scale": 0.25}),
    "an int scale": ((Q, K, V), {"scale": 1}),
    "scale of numpy": ((Q, K, V), {"scale": np.float32(0.25)}),
    "scale as an array": ((Q, K, V), {"scale": mx.array(0.25)}),
    "sinks": ((Q, K, V), {"scale": 0.25, "sinks": mx.ones(4)}),
    "sinks in 16 bits": ((Q, K, V), {"scale": 0.25, "sinks": mx.ones(4, mx.bfloat16)}),
    "another head_dim of v": ((Q, K, V[..., :8]), {"scale": 0.25}),
    "no queries": ((Q[:, :, :0], K, V), {"scale": 0.25}),
    "a device": ((Q, K, V), {"scale": 0.25, "stream": mx.cpu}),
    "a stream": ((Q, K, V), {"scale": 0.25, "stream": mx.default_stream(mx.cpu)}),
    "force_fused=False": ((Q, K, V), {"scale": 0.25, "force_fused": False}),
}
TOO_WIDE = mx.ones((1, 1, 3, 513))
FALLS_BACK = {
    "float64": (of(mx.float64, Q, K, V), {"scale": 0.25, "stream": mx.cpu}, "dtype float64"),
    "a head_dim over 512": ((TOO_WIDE, TOO_WIDE, TOO_WIDE), {"scale": 0.1}, "head_dim over 512"),
    "values over 512": ((TOO_WIDE[..., :8], TOO_WIDE[..., :8], TOO_WIDE), {"scale": 0.1}, "head_dim over 512"),
}
REFUSED = {
    "no scale": ((Q, K, V), {}),
    "scale None": ((Q, K, V), {"scale": None}),
    "no arrays": ((), {}),
    "a fourth array": ((Q, K, V, 0.25), {}),
    "another argument": ((Q, K, V), {"scale": 0.25, "memory_efficient_threshold": 4096}),
    "another word": ((Q, K, V), {"scale": 0.25, "mask": "array"}),
    "an empty word": ((Q, K, V), {"scale": 0.25, "mask": ""}),
    "a mask of numpy": ((Q, K, V), {"scale": 0.25, "mask": np.array(SEEN)}),
    "a list as a mask": ((Q, K, V), {"scale": 0.25, "mask": [True] * 9}),
    "queries of numpy": ((np.array(Q), K, V), {"scale": 0.25}),
    "a mask of another shape": ((Q, K, V), {"scale": 0.25, "mask": SEEN[:, 0]}),
    "a wider mask": ((*of(mx.bfloat16, Q, K, V),), {"scale": 0.25, "mask": mx.where(SEEN, 0.0, -1e9)}),
    "wider sinks": ((*of(mx.bfloat16, Q, K, V),), {"scale": 0.25, "sinks": mx.zeros(4)}),
    "another batch": ((Q[:1], K, V), {"scale": 0.25}),
    "heads that are no multiple": ((Q[:, :3], K, V), {"scale": 0.25}),
    "int queries": (of(mx.int32, Q, K, V), {"scale": 0.25}),
    "complex queries": ((*of(mx.complex64, Q), K, V), {"scale": 0.25}),
    "three dimensions": ((Q[0], K[0], V[0]), {"scale": 0.25}),
    "five dimensions": ((Q[None], K[None], V[None]), {"scale": 0.25, "mask": "causal"}),
    "keys with one": ((Q, K[0, 0, 0], V), {"scale": 0.25, "mask": SEEN}),
    "a description of a mask": ((Q, K, V), {"scale": 0.25, "mask": Causal()}),
    "force_fused=None": ((Q, K, V), {"scale": 0.25, "force_fused": None}),
    "queries with three": ((Q[:1, 0], K[:1, :1], V[:1, :1]), {"scale": 0.25}),
    "a word as a scale": ((Q, K, V), {"scale": "0.25"}),
    "a tuple as keys": ((Q, (K, K, K), V), {"scale": 0.25}),
    "no stream": ((Q, K, V), {"scale": 0.25, "stream": "cpu"}),
}


def attention(arrays, options):
    return mx.fast.scaled_dot_product_attention(*arrays, **options)


@promise("the op takes all arguments of MLX's own attention, with the same results")
@promise("the patched function takes all that MLX's takes, with the same results")
@pytest.mark.rotate(1, default=4)
@pytest.mark.parametrize(("arrays", "options"), TAKEN.values(), ids=TAKEN)
def test_all_that_mlx_takes(arrays, options):
    off, on = off_and_on(lambda: attention(arrays, options))
    assert on.dtype == off.dtype
    assert on.shape == off.shape
    precise = off.dtype == mx.float32
    assert mx.allclose(on, off, rtol=0, atol=1e-5 if precise else 2e-2)


def test_a_fused_kernel_that_is_asked_for():
    """With force_fused, MLX raises on the CPU, where it has no fused kernel. Flash attention is always fused."""
    with pytest.raises(ValueError, match="fused"):
        attention((Q, K, V), {"scale": 0.25, "force_fused": True})
    with flash.enabled(strict=True):
        on = attention((Q, K, V), {"scale": 0.25, "force_fused": True})
        mx.eval(on)
    assert mx.allclose(on, attention((Q, K, V), {"scale": 0.25}), atol=1e-5)


@promise("what MLX alone takes is a counted fallback")
@pytest.mark.parametrize(("arrays", "options", "reason"), FALLS_BACK.values(), ids=FALLS_BACK)
def test_what_mlx_alone_takes_is_a_counted_fallback(arrays, options, reason):
    off = attention(arrays, options)
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match=reason) as warned:
        on = attention(arrays, options)
    with mx.stream(mx.cpu):
        assert mx.array_equal(on, off)
    assert flash.status().fallbacks == {reason: 1}
    assert warned[0].filename == __file__
    with pytest.raises(flash.FlashFallbackError, match=reason), flash.enabled(strict=True):
        attention(arrays, options)


def test_a_traced_scale_falls_back():
    """MLX takes the array's value, whose gradient is 0, or raises. Our op would refuse it."""
    attend = lambda scale: attention((Q, K, V), {"scale": scale})  # noqa: E731

    def gradient():
        return mx.value_and_grad(lambda scale: attend(scale).sum())(mx.array(0.25))

    off = gradient()
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="scale is an array of float32"):
        on = gradient()
    assert [x.item() for x in on] == [x.item() for x in off]
    assert sum(flash.status().fallbacks.values()) == 1
    for transformed in (mx.compile(attend), lambda scale: mx.vmap(attend)(scale[None])):
        for arm in (nullcontext(), flash.enabled()):
            with arm, pytest.raises(TypeError, match="incompatible function arguments"):
                transformed(mx.array(0.25))


@promise("bad arguments raise MLX's own error, and are no fallback")
@pytest.mark.rotate(1, default=6)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("arrays", "options"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_have_mlx_s_own_error(arrays, options, strict):
    """A call with bad arguments does not count as a fallback, and gives no warning."""

    def refused():
        with pytest.raises((TypeError, ValueError)) as error:
            attention(arrays, options)
        return error.type, str(error.value)

    off = refused()
    with warnings.catch_warnings(), pytest.raises(flash.FlashNeverRanError) if strict else nullcontext():
        warnings.simplefilter("error")
        with flash.enabled(strict=strict):
            on = refused()
    assert on == off
    assert flash.status().fallbacks == {}


def test_an_argument_that_a_later_mlx_takes():
    """A call with an unknown argument goes to MLX's own function."""
    given = {}

    def later(*arrays, **options):
        given.update(options)
        return arrays[0]

    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="does not support the arguments window"):
        flash_instead_of(later)(Q, K, V, scale=0.25, window=4)
    assert given == {"scale": 0.25, "window": 4}
