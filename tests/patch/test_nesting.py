"""Another library may replace a function that the patch replaces. Both can be switched on and off in any order."""

import itertools
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base

from tests.patch.arms import calls_of

Q = mx.random.normal((1, 2, 12, 16))


class Library:
    """Saves the current function, wraps it, and later restores it, as mlx-dspark and mlx-mfa do."""

    def __init__(self):
        self.calls, self.saved = 0, None

    def on(self):
        saved = self.saved = mx.fast.scaled_dot_product_attention

        def theirs(*arrays, **options):
            self.calls += 1
            return saved(*arrays, **options)

        mx.fast.scaled_dot_product_attention = self.function = theirs

    def off(self):
        mx.fast.scaled_dot_product_attention, self.saved = self.saved, None

    @property
    def is_on(self):
        return self.saved is not None


class Early(Library):
    """On import, saves MLX's function in an attribute of its own module. The replacement calls this saved function."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.module = types.ModuleType("an_early_library")
        self.module.SAVED = mx.fast.scaled_dot_product_attention
        monkeypatch.setitem(sys.modules, "an_early_library", self.module)

    def on(self):
        self.saved = True

        def theirs(*arrays, **options):
            self.calls += 1
            return self.module.SAVED(*arrays, **options)

        mx.fast.scaled_dot_product_attention = self.function = theirs

    def off(self):
        mx.fast.scaled_dot_product_attention, self.saved = self.module.SAVED, None


@pytest.fixture(params=["late", "early"])
def library(request, monkeypatch):
    return Library() if request.param == "late" else Early(monkeypatch)


def ran():
    """How many kernels of flash attention run in one call of mx.fast.scaled_dot_product_attention."""
    return calls_of(lambda: mx.fast.scaled_dot_product_attention(Q, Q, Q, scale=0.25))


class Patch:
    is_on = False

    def on(self):
        flash.enable()
        self.is_on = True

    def off(self):
        flash.disable()
        self.is_on = False


@pytest.mark.rotate(1, default=8)
@pytest.mark.parametrize("order", list(itertools.product("lp", repeat=5)), ids="".join)
def test_every_order(library, order, mlx_own):
    """Each letter of `order` switches the library (l) or the patch (p) on or off.

    While the patch is on, calls are flash attention. While the library is off, no call reaches the library.
    """
    patch = Patch()
    for name in order:
        one = {"l": library, "p": patch}[name]
        one.off() if one.is_on else one.on()
        before = library.calls
        assert ran() == int(patch.is_on), name
        if not library.is_on:
            assert library.calls == before
            assert (mx.fast.scaled_dot_product_attention is mlx_own) != patch.is_on
    for one in (library, patch):
        if one.is_on:
            one.off()
    assert mx.fast.scaled_dot_product_attention is mlx_own
    assert type(mx.fast) is type(mx)


def test_theirs_is_on_top_where_it_comes_last(library):
    flash.enable()
    library.on()
    with flash.enabled():  # the block does not displace the library's function
        assert mx.fast.scaled_dot_product_attention is library.function
    assert ran() == 1
    assert library.calls == 1
    assert "mx.fast.scaled_dot_product_attention" in flash.status().foreign
    assert "theirs" in str(flash.status())
    flash.disable()
    assert mx.fast.scaled_dot_product_attention is library.function
    assert ran() == 0
    assert library.calls == 2
    library.off()


def test_mlx_lm_s_calls_reach_a_library_that_wraps_the_patch(library):
    """If another library has wrapped the patch's function in mx.fast, mlx-lm's patched function calls the wrapper."""
    flash.enable()
    base.scaled_dot_product_attention(Q, Q, Q, None, 1.0, None)
    library.on()
    base.scaled_dot_product_attention(Q, Q, Q, None, 1.0, None)
    assert library.calls == 1
    library.off()
    base.scaled_dot_product_attention(Q, Q, Q, None, 1.0, None)
    assert library.calls == 1


def test_a_fallback_is_theirs_and_counted_once(library):
    """A call that flash attention cannot compute goes to the library, even one that wraps the patch's function."""
    q = mx.ones((1, 1, 3, 600))
    flash.enable()
    library.on()
    flash.disable()
    flash.enable()  # now the patch wraps the library's function, which wraps the patch's earlier function
    with pytest.warns(flash.FlashFallbackWarning, match="head_dim over 512"):
        mx.eval(mx.fast.scaled_dot_product_attention(q, q, q, scale=0.25))
    assert flash.status().fallbacks == {"head_dim over 512": 1}
    assert library.calls == 1
    flash.disable()
    library.off()


def test_an_older_wrapper_gets_what_was_given(monkeypatch):
    """The patch passes on only the arguments that the caller gave. A library's wrapper may lack the newer `sinks`."""

    def theirs(q, k, v, *, scale, mask=None):
        return own(q, k, v, scale=scale, mask=mask)

    own, q = mx.fast.scaled_dot_product_attention, mx.ones((1, 1, 3, 600))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", theirs)
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning):
        mx.eval(mx.fast.scaled_dot_product_attention(q, q, q, scale=0.25))


def test_a_function_of_mlx_lm_that_is_theirs(monkeypatch):
    """If another library has replaced a function of mlx-lm, the patch warns, and replaces all other functions."""

    def theirs(*args, **kwargs):
        return mask(*args, **kwargs)

    mask = base.create_causal_mask
    theirs.__module__, theirs.__name__, theirs.__wrapped__ = mask.__module__, mask.__name__, mask
    monkeypatch.setattr(base, "create_causal_mask", theirs)
    with pytest.warns(flash.FlashFallbackWarning, match=r"base\.create_causal_mask was not replaced: its source"):
        flash.enable()
    assert base.create_causal_mask is theirs
    assert list(flash.status().foreign) == ["mlx_lm.models.base.create_causal_mask"]
    assert ran() == 1
    flash.disable()
    assert base.create_causal_mask is theirs


@pytest.mark.slow("2 seconds")
def test_threads_that_switch_both(mlx_own):
    """Threads switch two libraries and the patch all the time. When they end, MLX's own function is back."""

    lock_of_libraries = threading.Lock()

    def switch_library():
        library = Library()
        for _ in range(30):
            mx.fast.scaled_dot_product_attention(Q, Q, Q, scale=0.25)
            with lock_of_libraries:  # with both libraries on, one would save the other's function as MLX's
                library.on()
                library.off()

    def switch_patch():
        for _ in range(30):
            with flash.enabled():
                mx.fast.scaled_dot_product_attention(Q, Q, Q, scale=0.25)

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(switch) for switch in (switch_library, switch_patch) * 2]
    assert not any(each.exception() for each in work)
    assert mx.fast.scaled_dot_product_attention is mlx_own
    assert type(mx.fast) is type(mx)


class SwitchedTwice(Library):
    """If mx.fast has another function, such as the patch's, on() saves it and installs the library's function."""

    def __init__(self):
        super().__init__()

        def theirs(*arrays, **options):
            self.calls += 1
            return self.saved(*arrays, **options)

        self.function = theirs

    def on(self):
        if mx.fast.scaled_dot_product_attention is not self.function:
            self.saved = mx.fast.scaled_dot_product_attention
            mx.fast.scaled_dot_product_attention = self.function


def test_a_library_that_is_switched_on_twice(mlx_own):
    """The library's and the patch's function each call the other. Fallbacks still end at MLX's own function."""
    library = SwitchedTwice()
    try:
        library.on()
        flash.enable()
        library.on()
        assert ran() == 1
        q = mx.ones((1, 1, 3, 600))
        with pytest.warns(flash.FlashFallbackWarning, match="head_dim over 512"):
            mx.eval(mx.fast.scaled_dot_product_attention(q, q, q, scale=0.25))
        assert flash.status().fallbacks == {"head_dim over 512": 1}
        flash.disable()
        assert ran() == 0
        assert library.calls
    finally:
        flash.disable()
        mx.fast.scaled_dot_product_attention = mlx_own
