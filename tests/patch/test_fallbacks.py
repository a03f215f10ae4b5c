"""Calls that flash attention does not take go to mlx-lm's own function: counted by reason, warned about once."""

import threading
import warnings

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import NoKernelError
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache
from mlxlm_flash_patch import route

WIDE = {name: mx.zeros((1, 2, 5, 600)) for name in ("queries", "keys", "values")}  # falls back


def attention(**given):
    q, k = (mx.random.normal((1, 2, 5, 8), key=mx.random.key(i)) for i in range(2))
    arguments = {"queries": q, "keys": k, "values": k, "cache": None, "scale": 0.3, "mask": "causal", "sinks": None}
    return base.scaled_dot_product_attention(**{**arguments, **given})


def zeros(dtype):
    return mx.zeros((1, 2, 5, 8), dtype)


def test_float64():
    given = {name: zeros(mx.float64) for name in ("queries", "keys", "values")}
    with mx.stream(mx.cpu):
        off = attention(**given)
        with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="dtype float64"):
            on = attention(**given)
        assert on.dtype == off.dtype
        assert mx.array_equal(on, off)
    assert flash.status().fallbacks == {"dtype float64": 1}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("names", [("keys",), ("values",), ("queries", "keys")], ids=" and ".join)
def test_two_dtypes_are_promoted(names, dtype):
    """As MLX does it; phi2 computes queries and keys in float32, whatever the model's dtype."""
    given = {name: mx.random.normal((1, 2, 5, 8), key=mx.random.key(7)).astype(dtype) for name in names}
    off = attention(**given)
    with flash.enabled(strict=True):
        on = attention(**given)
        assert mx.allclose(on, off, atol=1e-5)
    assert on.dtype == off.dtype == mx.float32


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "flash_takes_it"), [(512, 512, True), (513, 8, False), (8, 513, False)]
)
def test_head_dims(head_dim, value_dim, flash_takes_it):
    given = {"queries": mx.ones((1, 4, 5, head_dim)), "keys": mx.ones((1, 2, 5, head_dim))}
    given["values"] = mx.random.normal((1, 2, 5, value_dim), key=mx.random.key(0))
    off = attention(**given)
    with flash.enabled(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert mx.allclose(attention(**given), off, rtol=1e-4, atol=1e-4)
    reasons = {} if flash_takes_it else {"head_dim over 512": 1}
    assert flash.status().fallbacks == reasons
    assert len(warned) == len(reasons)


def test_no_kernel(monkeypatch):
    """What the core has no kernel for, such as a GPU stream of a build without Metal kernels, in the core's words."""

    def refuse(*_, **__):
        raise NoKernelError("no kernels for the moon")

    monkeypatch.setattr(route, "flash_attention", refuse)
    off = attention()
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="no kernels for the moon"):
        assert mx.array_equal(attention(), off)
    assert flash.status().fallbacks == {"no kernels for the moon": 1}


def test_other_errors_are_not_swallowed():
    """Bad input is an error with the patch as without it, not a reason to try the other way."""
    three_heads = mx.zeros((1, 3, 5, 8))
    with pytest.raises(ValueError, match="heads"):
        attention(keys=three_heads, values=three_heads)
    with flash.enabled(), pytest.raises(ValueError, match="heads"):
        attention(keys=three_heads, values=three_heads)
    assert flash.status().fallbacks == {}


def test_a_mask_that_mlx_refuses_is_refused():
    """An additive mask of a wider dtype than the queries'."""
    given = {name: zeros(mx.float16) for name in ("queries", "keys", "values")}
    given["mask"] = mx.zeros((5, 5))
    with pytest.raises(ValueError, match="Mask type"):
        attention(**given)
    with flash.enabled(), pytest.raises(ValueError, match="mask"):
        attention(**given)


def test_warned_once_for_each_reason_and_counted_each_time():
    with flash.enabled(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            attention(**WIDE)
            attention(cache=None)
        given = {name: zeros(mx.float64) for name in ("queries", "keys", "values")}
        with mx.stream(mx.cpu):
            attention(**given)
            attention(**given)
    assert [str(w.message).partition(": ")[2].partition(" (")[0] for w in warned] == [
        "head_dim over 512",
        "dtype float64",
    ]
    assert {w.category for w in warned} == {flash.FlashFallbackWarning}
    assert flash.status().fallbacks == {"head_dim over 512": 3, "dtype float64": 2}


def test_warnings_as_errors(original):
    """The first call of a reason ends in the error, counted; the patch goes on, and out, as if nothing were."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with flash.enabled():
            with pytest.raises(flash.FlashFallbackWarning):
                attention(**WIDE)
            attention(**WIDE)
            attention().tolist()
            assert flash.status().enabled
            assert flash.status().fallbacks == {"head_dim over 512": 2}
            assert flash.status().calls == {"cpu_decode": 1}
    assert base.scaled_dot_product_attention is original


def test_the_warning_points_at_the_caller():
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning) as warned:
        attention(**WIDE)
    assert warned[0].filename == __file__


def test_counts_begin_anew_with_the_next_enable():
    for _ in range(2):
        with flash.enabled(), pytest.warns(flash.FlashFallbackWarning):
            attention(**WIDE)
        assert flash.status().fallbacks == {"head_dim over 512": 1}


def test_counted_in_all_threads():
    def work():
        for _ in range(200):
            attention(**WIDE)

    with flash.enabled(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert flash.status().fallbacks == {"head_dim over 512": 800}
    assert len(warned) == 1


def test_plain_calls_do_not_fall_back(tiny, tokens):
    model = tiny()
    with flash.enabled():
        model(tokens(), cache=make_prompt_cache(model)).tolist()
    assert flash.status().fallbacks == {}
