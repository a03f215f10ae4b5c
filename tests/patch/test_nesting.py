"""Another library may replace a function that the patch replaces. Its function stays, whichever is switched on first.

status() names the library's function. Where the patch finds it when it goes in, it warns once. Both can be switched on
and off in any order.
"""

import contextlib
import functools
import itertools
import sys
import types
import warnings

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base
from mlxlm_flash_patch.patch_points import MX_ATTENTION, POINTS

from tests.core.programs import python
from tests.patch.arms import calls_of
from tests.promises import promise

Q = mx.random.normal((1, 2, 12, 16))
theirs_stays = pytest.warns(flash.FlashFallbackWarning, match=r"another library's function, .*\.(theirs|Proxy), is in")


class Proxy:
    """Like wrapt.FunctionWrapper: pretends to be the function that it wraps."""

    __class__ = property(lambda self: type(self.wrapped))

    def __init__(self, wrapped, call=None):
        self.wrapped, self.call = wrapped, call

    def __hash__(self):
        return hash(self.wrapped)

    def __eq__(self, other):
        return self.wrapped == other

    def __getattr__(self, name):
        return getattr(self.wrapped, name)

    def __call__(self, *arguments, **options):
        return self.call(*arguments, **options)


class Library:
    """Saves a function, puts its own in place, which calls the saved one, and later restores it.

    `late` libraries, such as mlx-dspark and mlx-mfa, save the function that they find when they are switched on.
    `early` ones save MLX's function on import, in an attribute of their own module. `proxy` is late.
    """

    def __init__(self, when, monkeypatch):
        self.when, self.calls, self.is_on = when, 0, False
        self.home = types.ModuleType("an_early_library") if when == "early" else types.SimpleNamespace()
        if when == "early":
            monkeypatch.setitem(sys.modules, "an_early_library", self.home)
            self.home.saved = mx.fast.scaled_dot_product_attention

    def on(self):
        if self.when != "early":
            self.home.saved = mx.fast.scaled_dot_product_attention

        def theirs(*arrays, **options):
            self.calls += 1
            return self.home.saved(*arrays, **options)

        function = Proxy(self.home.saved, theirs) if self.when == "proxy" else theirs
        mx.fast.scaled_dot_product_attention, self.is_on = function, True

    def off(self):
        mx.fast.scaled_dot_product_attention, self.is_on = self.home.saved, False


@pytest.fixture(params=["late", "early", "proxy"])
def library(request, monkeypatch):
    return Library(request.param, monkeypatch)


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


@promise("other libraries that exchange the same function nest in any order")
@pytest.mark.rotate(1, default=8)
@pytest.mark.filterwarnings("ignore::mlxlm_flash_patch.FlashFallbackWarning")
@pytest.mark.parametrize("order", list(itertools.product("lp", repeat=5)), ids="".join)
def test_every_order(library, order, mlx_own):
    """Each letter of `order` switches the library (l) or the patch (p) on or off.

    While the library is on, calls reach it. If it then calls the patch's function, or one that the patch has exchanged,
    and the patch is on, calls are flash attention.
    """
    patch = Patch()
    for name in order:
        one = {"l": library, "p": patch}[name]
        one.off() if one.is_on else one.on()
        before = library.calls
        reaches_the_patch = library.when == "early" or not library.is_on or library.home.saved is not mlx_own
        assert ran() == int(patch.is_on and reaches_the_patch), name
        assert library.calls - before == int(library.is_on)
        assert (MX_ATTENTION.name in flash.status().foreign) == library.is_on
        if not library.is_on:
            assert (mx.fast.scaled_dot_product_attention is mlx_own) != patch.is_on
    for one in (library, patch):
        if one.is_on:
            one.off()
    assert mx.fast.scaled_dot_product_attention is mlx_own
    assert type(mx.fast) is type(mx)


def theirs(*arguments, **options):
    raise AssertionError("the patch has called another library's function")


FOREIGN = {
    "a function": lambda own: theirs,
    "a function with the same names": lambda own: functools.wraps(own)(lambda *arguments: own(*arguments)),
    "a partial function": functools.partial,
    "an object": Proxy,
}
SWITCHES = {
    "enable": lambda stack, model: flash.enable(),
    "enabled": lambda stack, model: stack.enter_context(flash.enabled()),
    "patch_model": lambda stack, model: flash.patch_model(model),
}


@promise("another library's function stays, and is named")
@pytest.mark.rotate(1, default=9)
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_theirs_stays_where_it_came_first(point, kind, switch, tiny, monkeypatch):
    """The patch leaves the library's function where it is, names it, warns once, and replaces all other functions."""
    theirs = FOREIGN[kind](point.current)
    monkeypatch.setattr(point.owner, point.attribute, theirs)
    model = tiny()
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        SWITCHES[switch](stack, model)
        with flash.enabled():
            flash.patch_model(model)
        [line] = [str(each.message) for each in warned]
        assert line.startswith(f"{point.name} was not replaced: another library's function, ")
        assert point.current is theirs
        assert list(flash.status().foreign) == [point.name]
        assert set(flash.status().patched) == {each.name for each in POINTS if each is not point}
    flash.unpatch_model(model)
    flash.disable()
    assert point.current is theirs


def test_their_attention_over_quantised_caches_gets_arrays_too(monkeypatch):
    """mlx-lm calls that function for each cache that has `bits`, whatever the cache returns."""
    q, cache = mx.ones((1, 2, 1, 64)), types.SimpleNamespace(bits=4, group_size=64)
    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", lambda *_, **__: q * 7)
    with pytest.warns(flash.FlashFallbackWarning, match="another library's function"), flash.enabled():
        assert mx.array_equal(base.scaled_dot_product_attention(q, q, q, cache, 1.0, None), q * 7)
    monkeypatch.undo()
    with flash.enabled():
        theirs = Proxy(base.quantized_scaled_dot_product_attention, lambda *_, **__: q * 7)
        monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", theirs)
        packed = mx.quantize(q, group_size=64, bits=4)
        assert mx.array_equal(base.scaled_dot_product_attention(q, packed, packed, cache, 1.0, None), q * 7)
        monkeypatch.undo()


def test_theirs_is_written_into_the_module_s_dict(monkeypatch):
    with flash.enabled(), monkeypatch.context() as changed:
        changed.setitem(vars(mx.fast), "scaled_dot_product_attention", lambda *_, **__: 7)
        assert base.scaled_dot_product_attention(Q, Q, Q, None, 1.0, None) == 7


def test_an_object_in_place_of_mx_fast(monkeypatch):
    monkeypatch.setattr(mx, "fast", types.SimpleNamespace())
    with pytest.raises(TypeError, match=r"mx.fast is .*, expected MLX's module"):
        flash.enable()
    assert not flash.status().enabled


FIRST_OF_ALL = """
import mlx.core as mx
own, q = mx.fast.scaled_dot_product_attention, mx.ones((1, 1, 4, 8))

def theirs(*arrays, own=own, **options):
    return 2 * own(*arrays, **options)

mx.fast.scaled_dot_product_attention = theirs
import mlxlm_flash_patch as flash
flash.enable()
print(mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0).max().item(), flash.status().foreign)
mx.eval(own(q, q, q, scale=1.0))
print(flash.status().calls)
"""


def test_theirs_was_there_before_the_patch_was_imported():
    """The patch still finds MLX's own function, and exchanges it where a module holds it, here as `own`."""
    first, second = python(FIRST_OF_ALL, "-W", "ignore").stdout.splitlines()
    assert first == "2.0 {'mx.fast.scaled_dot_product_attention': '__main__.theirs'}"
    assert second == "{'cpu_decode': 1}"


def test_a_fallback_is_theirs_and_counted_once(library):
    """A call that flash attention cannot compute goes to the library, even one that wraps the patch's function."""
    q = mx.ones((1, 1, 3, 600))
    flash.enable()
    library.on()
    flash.disable()
    with theirs_stays:
        flash.enable()
    with pytest.warns(flash.FlashFallbackWarning, match="head_dim over 512"):
        mx.eval(mx.fast.scaled_dot_product_attention(q, q, q, scale=0.25))
    assert flash.status().fallbacks == {"head_dim over 512": 1}
    assert library.calls == 1
    flash.disable()
    library.off()
