"""when="faster": what mlx-lm's own attention computes faster is left to it, and counted apart from fallbacks."""

import warnings
from dataclasses import replace

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import _ext, tuned
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
from flashattn_core.tuned import Call, Measured
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlxlm_flash_patch import faster

PROMPT, STEP = Call("float32", 4, 2, 32, 20, 20), Call("float32", 4, 2, 32, 1, 20)


def measured(call, mlx, ours=2.0, mlx_bytes=100, our_bytes=100):
    return Measured(call, {"mlx": mlx, "a_kernel": ours}, {"mlx": mlx_bytes, "a_kernel": our_bytes})


@pytest.fixture
def table(monkeypatch):
    """table(...): what was measured on a GPU that this is taken for."""

    def take(*rows):
        monkeypatch.setattr(faster, "_table", lambda: list(rows))

    return take


@pytest.fixture
def slow_prompts(table):
    """mlx-lm's own attention is the faster one for prompts."""
    table(measured(PROMPT, mlx=1.0), measured(STEP, mlx=3.0))


def of(model, tokens, steps=2):
    """The logits of a prompt and of steps behind it."""
    cache = make_prompt_cache(model)
    out = [model(tokens, cache=cache)]
    out += [model(tokens[:, :1], cache=cache) for _ in range(steps)]
    mx.eval(out)
    return out


def test_what_is_faster_there_is_left(slow_prompts, tiny, tokens):
    model = tiny()
    off = of(model, tokens())
    with warnings.catch_warnings(), flash.enabled(strict=True, when="faster"):
        warnings.simplefilter("error")
        on = of(model, tokens())
        now = flash.status()
    assert now.calls == {"cpu_decode": 4}
    assert now.left == {"it is faster there": 2}
    assert now.fallbacks == {}
    assert "calls: cpu_decode 4 · fallbacks: none · left to MLX: 2, it is faster there" in str(now)
    assert mx.array_equal(on[0], off[0])
    assert all(mx.allclose(one, other, atol=1e-5) for one, other in zip(on, off, strict=True))


def test_asking_is_not_counted(slow_prompts, tiny, tokens):
    with flash.enabled(when="faster"):
        for prompts in (1, 2, 3):
            of(tiny(), tokens())
            for _ in range(2):
                assert flash.status().left == {"it is faster there": 2 * prompts}


def test_always_leaves_nothing(slow_prompts, tiny, tokens):
    with flash.enabled():
        of(tiny(), tokens())
    assert flash.status().left == {}
    assert "left" not in str(flash.status())


def test_less_than_half_of_the_memory_is_worth_more_time(table, tiny, tokens):
    half = 10**9 // 2
    table(
        measured(PROMPT, mlx=1.0, mlx_bytes=10**9, our_bytes=half - 1),
        measured(STEP, mlx=1.0, mlx_bytes=10**9, our_bytes=half),
    )
    with flash.enabled(when="faster"):
        of(tiny(), tokens())
    assert flash.status().calls == {"cpu_prefill": 2}
    assert flash.status().left == {"it is faster there": 4}


def test_what_was_not_measured_is_left(table, tiny, tokens):
    table(measured(replace(PROMPT, dtype="bfloat16"), mlx=3.0))
    with flash.enabled(when="faster"):
        of(tiny(), tokens())
    assert flash.status().left == {"nothing like them was measured": 6}


def test_strict_is_about_fallbacks_alone(table, tiny, tokens):
    table(measured(PROMPT, mlx=1.0))
    flash.enable(strict=True, when="faster")
    of(tiny(), tokens())
    assert flash.status().calls == {}
    flash.disable()  # does not raise that flash never ran


def test_what_cannot_be_flash_attention_is_a_fallback(slow_prompts, tiny, tokens, too_wide):
    with pytest.warns(flash.FlashFallbackWarning), flash.enabled(when="faster"):
        of(tiny(), tokens())
    assert flash.status().fallbacks == {too_wide: 6}
    assert flash.status().left == {}


def test_a_gradient_is_not_left(slow_prompts, tiny, tokens):
    model = tiny()
    with flash.enabled(when="faster"):
        mx.eval(mx.grad(lambda x: model.model.layers[0].self_attn(x, mask="causal").sum())(mx.ones((1, 20, 128))))
    assert flash.status().left == {}
    assert flash.status().calls == {"cpu_prefill": 1, "cpu_backward": 1}


def refused_there(sinks=None, batch=(1,), quantise=lambda x: x, cache=None):
    query, key = mx.ones((*batch, 4, 1, 64)), mx.ones((*batch, 2, 20, 64))
    stored = quantise(key)
    return base.scaled_dot_product_attention(query, stored, stored, cache, 0.125, None, sinks=sinks)


@pytest.mark.parametrize("tabled", [{}, {"bits": 8}], ids=["measured", "not measured"])
def test_what_mlx_lm_refuses_is_not_left(table, tabled):
    table(measured(Call("float32", 4, 2, 64, 1, 20, **tabled), mlx=1.0))
    with flash.enabled(when="faster"):
        mx.eval(refused_there(batch=(1, 1)))
        cache = QuantizedKVCache(group_size=64, bits=8)
        mx.eval(refused_there(mx.ones(4), quantise=lambda x: mx.quantize(x, 64, 8), cache=cache))
    assert flash.status().left == {}
    assert flash.status().calls == {"cpu_decode": 2}


@pytest.mark.parametrize("cuda", [False, True], ids=["elsewhere", "CUDA"])
def test_quantised_keys_are_not_left_on_cuda(table, monkeypatch, cuda):
    """MLX's CUDA build multiplies by them wrong, or not at all."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(faster, "_reasons", {})  # decisions are kept, and both cases are of one kind
    table(measured(call := replace(CALL, bits=8), mlx=1.0))
    assert reason(call) == (None if cuda else "it is faster there")


def test_arguments_are_checked_first(slow_prompts):
    query, key = mx.ones((1, 4, 1, 32)), mx.ones((1, 0, 20, 32))
    with flash.enabled(when="faster"), pytest.raises(ValueError, match="heads"):
        base.scaled_dot_product_attention(query, key, key, None, 1.0, None)


def test_a_gradient_of_a_mask_is_not_left(slow_prompts):
    arrays = [mx.ones((1, heads, 20, 32)) for heads in (4, 2, 2)]

    def attention(mask):
        return base.scaled_dot_product_attention(*arrays, cache=None, scale=1.0, mask=mask).sum()

    mask = mx.zeros((20, 20))
    with flash.enabled(when="faster"):
        for _ in range(2):  # neither decides about the other
            mx.eval(mx.value_and_grad(attention)(mask), attention(mask))
    assert flash.status().left == {"it is faster there": 2}
    assert flash.status().calls == {"cpu_prefill": 2}
    assert flash.status().fallbacks == {}


@pytest.mark.parametrize("wanted", range(4))
def test_a_gradient_of_one_of_the_four_is_not_left(slow_prompts, wanted):
    arrays = [mx.ones((1, heads, 20, 32)) for heads in (4, 2, 2)] + [mx.ones(4)]

    def attention(*three_and_sinks):
        *three, sinks = three_and_sinks
        return base.scaled_dot_product_attention(*three, cache=None, scale=1.0, mask="causal", sinks=sinks).sum()

    with flash.enabled(when="faster"):
        mx.eval(mx.grad(attention, argnums=wanted)(*arrays))
    assert flash.status().left == {}


def test_a_strict_block_within_in_which_nothing_ran(slow_prompts, tiny, tokens):
    with flash.enabled(when="faster"):
        of(tiny(), tokens())
        with pytest.raises(flash.FlashNeverRanError), flash.enabled(strict=True, when="faster"):
            pass


def test_one_block_that_wants_all_of_it(slow_prompts, tiny, tokens):
    with flash.enabled(when="faster"):
        with flash.enabled():
            of(tiny(), tokens())
        assert flash.status().left == {}
        of(tiny(), tokens())
        assert flash.status().left == {"it is faster there": 2}


def test_a_model_that_was_given_to_patch_model(slow_prompts, tiny, tokens):
    model = tiny()
    flash.patch_model(model)
    with flash.enabled(when="faster"):
        of(model, tokens())
    assert flash.status().left == {}
    flash.unpatch_model(model)


def test_the_second_enable_decides(slow_prompts, tiny, tokens):
    flash.enable(when="faster")
    flash.enable()
    of(tiny(), tokens())
    assert flash.status().left == {}


def test_on_the_cpu_nothing_is_left(tiny, tokens):
    with flash.enabled(when="faster"):
        of(tiny(), tokens())
    assert flash.status().left == {}
    assert flash.status().calls == {"cpu_prefill": 2, "cpu_decode": 4}


def test_a_gpu_of_which_nothing_was_measured(table, original):
    table()
    with pytest.raises(ValueError, match=r"nothing was measured on .*: run mlxlm-flash tune"):
        flash.enable(when="faster")
    assert base.scaled_dot_product_attention is original


def test_another_word(original):
    with pytest.raises(ValueError, match="when is 'sometimes', expected 'always' or 'faster'"):
        flash.enable(when="sometimes")
    assert base.scaled_dot_product_attention is original


# --- What a decision is of -----------------------------------------------------------------------------------

CALL = Call("float16", 4, 2, 32, 1, 1000)
KINDS = [
    {"dtype": "float32"},
    {"heads": 8},
    {"kv_heads": 1},
    {"head_dim": 64},
    {"query_len": 2},
    {"key_len": 2000},
    {"batch_size": 2},
    {"window": 9},
    {"softcap": True},
    {"sinks": True},
    {"padded": True},
    {"bits": 4},
]


def reason(call, mask=None):
    dtype = getattr(mx, call.dtype)
    query = mx.zeros((call.batch_size, call.heads, call.query_len, call.head_dim), dtype)
    key = mx.zeros((call.batch_size, call.kv_heads, call.key_len, call.head_dim), dtype)
    mask = mask or (SlidingWindow(call.window) if call.window else KeyRange(3) if call.padded else None)
    sinks, softcap = mx.zeros(call.heads, dtype) if call.sinks else None, 9.0 if call.softcap else None
    if call.bits:
        cache, stored = QuantizedKVCache(group_size=32, bits=call.bits), mx.quantize(key, bits=call.bits, group_size=32)
        return faster.reason_to_leave(query, stored, stored, cache, mask, sinks, softcap)
    return faster.reason_to_leave(query, key, key, None, mask, sinks, softcap)


@pytest.mark.parametrize("change", KINDS, ids=str)
def test_a_decision_is_of_one_kind_of_calls(change, table):
    faster.check()
    other = replace(CALL, **change)
    table(measured(CALL, mlx=1.0), measured(other, mlx=3.0))
    assert reason(CALL) == "it is faster there"
    assert reason(other) is None
    assert reason(CALL) == "it is faster there"


def test_calls_that_differ_in_two_things():
    def likeness(dtype, batch_size):
        key = mx.zeros((batch_size, 2, 9, 32), dtype)
        return _ext.likeness(mx.zeros((batch_size, 4, 1, 32), dtype), key, key, None)

    dtypes, batches = (mx.float16, mx.bfloat16, mx.float32), range(1, 17)
    assert len({likeness(dtype, size) for dtype in dtypes for size in batches}) == 48


def test_windows_within_other_masks(table):
    faster.check()
    narrow, wide = (replace(CALL, window=window, padded=True) for window in (16, 512))
    table(measured(narrow, mlx=1.0), measured(wide, mlx=3.0))
    assert reason(narrow, SlidingWindow(16) & KeyRange(3)) == "it is faster there"
    assert reason(wide, SlidingWindow(512) & KeyRange(3)) is None


def test_causal_is_no_padding(table):
    faster.check()
    table(measured(CALL, mlx=1.0), measured(replace(CALL, padded=True), mlx=3.0))
    assert reason(CALL, Causal()) == reason(CALL, "causal") == "it is faster there"


def test_a_step_with_a_key_more_is_looked_up(table):
    def likeness(keys):
        key = mx.zeros((1, 2, keys, 32))
        return _ext.likeness(mx.zeros((1, 4, 1, 32)), key, key, None)

    assert likeness(600) == likeness(601) == likeness(1023) != likeness(1024)


def test_decisions_are_made_anew_when_it_is_switched_on(table, tiny, tokens):
    for mlx, left in ((1.0, {"it is faster there": 6}), (3.0, {})):
        table(measured(PROMPT, mlx=mlx))
        with flash.enabled(when="faster"):
            of(tiny(), tokens())
        assert flash.status().left == left


def test_the_table_of_a_gpu(monkeypatch):
    """The CPU is taken for one, whose table there is."""
    monkeypatch.setattr(tuned, "here", lambda device: [measured(STEP, mlx=1.0)])
    assert faster._table() is None
    monkeypatch.setattr(faster.mx, "cpu", mx.gpu)
    assert faster._table() == [measured(STEP, mlx=1.0)]
