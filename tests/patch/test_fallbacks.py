"""Calls that flash attention cannot compute go to MLX. The patch counts them, and warns once for each reason."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import NoKernelError, _ext
from mlx_lm.models import base

from tests.promises import promise

WIDE = {name: mx.zeros((1, 2, 5, 600)) for name in ("queries", "keys", "values")}  # a call with these falls back


def attention(**given):
    q, k = (mx.random.normal((1, 2, 5, 8), key=mx.random.key(i)) for i in range(2))
    arguments = {"queries": q, "keys": k, "values": k, "cache": None, "scale": 0.3, "mask": "causal", "sinks": None}
    return base.scaled_dot_product_attention(**{**arguments, **given})


def of_dtype(dtype):
    return {name: mx.zeros((1, 2, 5, 8), dtype) for name in ("queries", "keys", "values")}


@pytest.fixture
def warned():
    """Lists the warnings of the test, including repeated ones."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@promise("every fallback is counted under its reason, with one warning for each reason")
def test_warned_once_for_each_reason_and_counted_each_time(warned):
    with mx.stream(mx.cpu):
        off = attention(**of_dtype(mx.float64))
    for _ in range(2):  # counts and warnings start again with each block
        warned.clear()
        with flash.enabled(), mx.stream(mx.cpu):
            for _ in range(3):
                attention(**WIDE)
                attention()
            for _ in range(2):
                on = attention(**of_dtype(mx.float64))
        reasons = [str(w.message).partition(": ")[2].partition(" (")[0] for w in warned]
        assert reasons == ["head_dim over 512", "dtype float64"]
        assert {w.category for w in warned} == {flash.FlashFallbackWarning}
        assert {w.filename for w in warned} == {__file__}  # the caller's file
        assert flash.status().fallbacks == {"head_dim over 512": 3, "dtype float64": 2}
        assert on.dtype == off.dtype
        assert mx.array_equal(on, off)


def test_warnings_as_errors(original):
    """If warnings are errors, the first fallback is counted and raises its warning. Later calls and disable() work."""
    with flash.enabled():
        with pytest.raises(flash.FlashFallbackWarning):
            attention(**WIDE)
        attention(**WIDE)
        attention().tolist()
        assert flash.status().enabled
        assert flash.status().fallbacks == {"head_dim over 512": 2}
        assert flash.status().calls == {"cpu_decode": 1}
    assert base.scaled_dot_product_attention is original


@pytest.mark.parametrize("strict", [False, True])
def test_in_all_threads(strict, warned):
    def raises(_):
        try:
            attention(**WIDE)
        except flash.FlashFallbackError:
            return True
        return False

    flash.enable(strict=strict)
    with ThreadPoolExecutor(4) as pool:
        raised = sum(pool.map(raises, range(800)))
    assert flash.status().fallbacks == {"head_dim over 512": 800}
    assert (raised, len(warned)) == ((800, 0) if strict else (0, 1))
    flash.enable(strict=False)


def test_no_kernel(monkeypatch):  # as on a GPU with an old driver
    monkeypatch.setattr(_ext, "quick", Mock(return_value=None))  # so attention() gets the call
    monkeypatch.setattr(_ext, "attention", Mock(side_effect=NoKernelError("no kernels for the moon")))
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="no kernels for the moon"):
        attention()
    assert flash.status().fallbacks == {"no kernels for the moon": 1}
