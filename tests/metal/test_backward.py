"""The error of gradients by Metal's kernels is within the bound that tests/core/gradient_oracle.py defines.

Each call runs all three launches: for delta, for dq, and for dk and dv. Most calls start from a forward pass by the
reference, not by the kernels. tests/cuda runs these tests with CUDA's kernels.
"""

import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import NoKernelError
from flashattn_core.masks import Causal, KeyRange

from tests.core import gradient_oracle, test_gradients
from tests.core.array_cases import hiding_most
from tests.core.gradient_oracle import assert_equal_weights, assert_obeys_the_rule, draw_call, unfused_gradients
from tests.core.oracle import DTYPES, roundings, to_numpy
from tests.core.test_gradients import with_options
from tests.core.test_grid import MASK_KINDS, mask_kinds, option_kinds
from tests.core.test_hidden_nan import MASKS
from tests.core.test_strides import column_major, reversed_rows, transposed
from tests.metal import metal_attention
from tests.metal.metal_backward import described, exactly_saved, run
from tests.metal.test_metal_kernels import CASES, SCHEDULES
from tests.promises import promise

LENGTHS = [*CASES["metal_prefill_reg"], (1, 33), (9, 129)]
DIMS = [(1, 1), (5, 7), (80, 96), (96, 64), (128, 128), (192, 128), (64, 200), (256, 256), (33, 8), (8, 256)]
GRADIENTS = ("dq", "dk", "dv")


close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def results(got):
    return [getattr(got, name) for name in GRADIENTS]


def in_numpy(got):
    return [to_numpy(gradient) for gradient in results(got)]


# --- Correctness ---------------------------------------------------------------------------------------


@promise("Metal's gradients agree with float64")
@pytest.mark.rotate(18)
@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grid(rng, dtype, group):
    turn = 5 * group + len(dtype)
    for i, (length, key_len) in enumerate(LENGTHS):
        sizes = {"heads": group, "kv_heads": 1, "length": length, "key_len": key_len, "dim": (64, 40)[i % 2]}
        call = draw_call(rng, batch=(2,), dtype=dtype, dlse=i % 3 != 0, **sizes)
        mask = mask_kinds(rng, length, key_len)[(turn + i) % MASK_KINDS]()
        call = with_options(call, mask, option_kinds(rng, group)[(turn + 3 * i) % 8])
        assert_obeys_the_rule(call, run(call, schedule=SCHEDULES[(turn + i) % len(SCHEDULES)]))


def test_many_rows_share_a_key(rng):
    call = draw_call(rng, heads=16, kv_heads=1, length=257, key_len=9)
    assert_obeys_the_rule(call, run(call))


@pytest.mark.rotate(20)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims(rng, dtype, dims):
    sizes = {"heads": 4, "dim": dims[0], "value_dim": dims[1], "dtype": dtype}
    for length, key_len in [(33, 40)] if max(dims) > 128 else [(33, 40), (70, 66)]:
        call = replace(draw_call(rng, length=length, key_len=key_len, **sizes), mask="causal")
        assert_obeys_the_rule(call, run(call))


@pytest.mark.parametrize("dims", [(257, 8), (8, 512)], ids=str)
def test_head_dims_above_256_are_refused(rng, dims):
    call = draw_call(rng, length=3, key_len=4, dim=dims[0], value_dim=dims[1])
    with pytest.raises(NoKernelError, match=f"metal_backward_dq takes a head_dim up to 256, found {max(dims)}"):
        described(call)


@pytest.mark.parametrize("kernel", ["metal_prefill_reg", "metal_prefill_tg"])
def test_behind_a_forward_kernel(rng, kernel):
    assert_right_behind(rng, kernel, metal_attention.run)


def assert_right_behind(rng, kernel, attention, rounds=False):
    """The backward kernels must compute right gradients from the results of the forward kernel `kernel`. In most rows,
    one key has nearly all of the weight.

    rounds: whether the call has precision="input". Then delta comes from the rounded `out`.
    """
    call = draw_call(rng, heads=4, kv_heads=2, length=70, key_len=60, dim=64, dtype="float16")
    options = {"mask": "causal", "softcap": 30.0, "sinks": mx.array(rng.standard_normal(4), mx.float16), "scale": 2.0}
    saved = attention(call.query, call.key, call.value, kernel=kernel, exact_out=not rounds, **options).saved
    call = replace(call, **options)
    got = run(call, saved, **({"precision": "input"} if rounds else {}))
    assert_obeys_the_rule(call, got, rounds_out=rounds)
    if not rounds:
        exact = unfused_gradients(call)
        for name in (*GRADIENTS, "dsinks"):  # from the rounded `out`, the errors are about 3
            assert roundings(getattr(got, name), getattr(exact, name)) < 1.05, name


def behind_a_forward(call):
    forward = metal_attention.run(call.query, call.key, call.value, mask=call.mask, kernel="metal_prefill_reg")
    return run(call, forward.saved)


@pytest.mark.parametrize("lowest", [float(np.finfo(np.float32).min), -1e9])
def test_rows_that_see_only_keys_with_the_lowest_float_added(rng, lowest):
    call = replace(draw_call(rng, length=33, key_len=40, dlse=False), mask=mx.full((33, 40), lowest))
    assert_equal_weights(call, behind_a_forward(call))


def test_the_lowest_float_hides_a_key_beside_others(rng):
    """Some models hide keys by adding the lowest float32 number to their scores. The first 8 rows see only such keys.

    Here the first 8 rows of dout and dlse are 0, so that these rows add nothing to the gradients.
    """
    call, later = draw_call(rng, length=40, key_len=40), mx.arange(40) >= 8
    call = replace(call, dout=call.dout * later[:, None], dlse=call.dlse * later)
    shown = later[:, None] & (mx.arange(40) >= 20)
    lows = float(np.finfo(np.float32).min), -mx.inf
    lowest, hidden = (behind_a_forward(replace(call, mask=mx.where(shown, 0, low))) for low in lows)
    for got, expected in zip(results(lowest), results(hidden), strict=True):
        np.testing.assert_allclose(to_numpy(got), to_numpy(expected), atol=1e-6)


# --- Tests from tests/core/test_gradients.py, run through these kernels ---------------------------------------------


@pytest.fixture(autouse=True)
def through_metal(monkeypatch):
    for module in (gradient_oracle, test_gradients):
        monkeypatch.setattr(module, "flash_gradients", run)


TestAdversarial = test_gradients.TestAdversarial
test_strided = test_gradients.test_strided
test_empty = test_gradients.test_empty
test_rows_that_see_nothing_have_zero_gradients = test_gradients.test_rows_that_see_nothing_have_zero_gradients


def test_saved_results_of_any_strides(rng):
    call = replace(draw_call(rng, batch=(2,), heads=4, length=33, key_len=97, dim=24, value_dim=40), mask="causal")
    out, lse, row_stats = exactly_saved(call)
    saved = transposed(out), reversed_rows(lse[..., None])[..., 0], column_major(row_stats)
    test_gradients.assert_equal(results(run(call, saved=saved)), results(run(call)))


# --- Hidden keys, and NaN or infinity ------------------------------------------------------------------


@pytest.mark.rotate(12)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"alibi_slopes": mx.array([1.0, 0.5])}], ids=str)
@pytest.mark.parametrize("poison", [mx.nan, mx.inf])
@pytest.mark.parametrize("mask", MASKS)
def test_nan_in_keys_hidden_from_all(rng, mask, poison, options):
    for length in (8, 97):
        call = replace(draw_call(rng, length=length, key_len=97, value_dim=24), mask=MASKS[mask], **options)
        clean = run(call)
        seen = mx.array(to_numpy(clean.dv).any(axis=(0, 1, 3)))
        assert not seen.all()
        key, value = (mx.where(seen[:, None], x, poison) for x in (call.key, call.value))
        got = run(replace(call, key=key, value=value))
        for own, expected, name in zip(in_numpy(got), in_numpy(clean), GRADIENTS, strict=True):
            close(own, expected, err_msg=name)  # tiles with NaN or infinity are summed in another order than others


@pytest.mark.rotate(4)
@pytest.mark.parametrize("dims", [(16, 16), (128, 160)], ids=str)
@pytest.mark.parametrize("poison", [mx.nan, mx.inf])
def test_nan_in_a_key_hidden_from_some(rng, poison, dims):
    """Under a causal mask, only the queries from row 70 on see key 70."""
    call = replace(draw_call(rng, length=97, key_len=97, dim=dims[0], value_dim=dims[1]), mask="causal")
    clean, at = to_numpy(run(call).dq), (mx.arange(97) == 70)[:, None]
    for name in ("key", "value"):
        dq = to_numpy(run(replace(call, **{name: mx.where(at, poison, getattr(call, name))})).dq)
        close(dq[:, :, :70], clean[:, :, :70])
        assert not np.isfinite(dq[:, :, 70:]).all(axis=(2, 3)).any()


@pytest.mark.rotate(8)
@pytest.mark.parametrize("dims", [(16, 16), (128, 160)], ids=str)
@pytest.mark.parametrize("poison", [mx.nan, mx.inf])
@pytest.mark.parametrize("name", ["query", "dout"])
def test_nan_in_a_row_reaches_only_the_keys_that_it_sees(rng, name, poison, dims):
    """Under a causal mask, row 40 sees keys 0 to 40."""
    call = replace(draw_call(rng, length=97, key_len=97, dim=dims[0], value_dim=dims[1]), mask="causal")
    dq, *of_keys = in_numpy(run(call))
    at = (mx.arange(97) == 40)[:, None]
    own_dq, *own_of_keys = in_numpy(run(replace(call, **{name: mx.where(at, poison, getattr(call, name))})))
    assert not np.isfinite(own_dq[:, :, 40]).all(axis=-1).any()
    close(np.delete(own_dq, 40, axis=2), np.delete(dq, 40, axis=2))
    for own, clean in zip(own_of_keys, of_keys, strict=True):
        close(own[:, :, 41:], clean[:, :, 41:])
        assert not np.isfinite(own[:, :, :41]).all()


# --- Batches, schedules and counts ---------------------------------------------------------------------


def test_batches(rng):
    call = draw_call(rng, batch=(2, 1, 3), heads=4, kv_heads=2, length=9, key_len=17, dim=8)
    call = replace(call, mask=Causal() & KeyRange(mx.arange(6).reshape(2, 1, 3)))
    assert_obeys_the_rule(call, run(call))


@pytest.mark.rotate(4)
@pytest.mark.parametrize("dim", [64, 256])
def test_the_schedule_changes_no_bit(rng, dim):
    sizes = {"heads": 7, "kv_heads": 1, "length": 70, "key_len": 97, "dim": dim, "dtype": "float16"}
    call = replace(draw_call(rng, **sizes), mask="causal")
    first = run(call)
    for schedule in SCHEDULES[1:]:
        other = run(call, schedule=schedule)
        assert first.counts == other.counts
        test_gradients.assert_equal(results(first), results(other))


@pytest.mark.rotate(4)
@pytest.mark.parametrize("kernel", ["backward_dq", "backward_dkv"])
def test_hidden_tiles_are_left_out(rng, kernel):
    call = draw_call(rng, heads=1, kv_heads=1, length=512, key_len=512, dim=64, dtype="float16")
    everything = run(call).counts[kernel]
    for mask in hiding_most(512, mx.float16):
        counts = run(replace(call, mask=mask)).counts[kernel]
        assert counts.mma < 0.25 * everything.mma
        assert counts.device_read < 0.5 * everything.device_read


@pytest.mark.rotate(4)
@pytest.mark.parametrize("kernel", ["backward_dq", "backward_dkv"])
def test_shown_tiles_read_no_mask(rng, kernel):
    """If the mask is an array that equals a causal mask, only tiles on the diagonal may read it."""
    call = draw_call(rng, heads=1, kv_heads=1, length=256, key_len=256, dim=64)
    plain = run(replace(call, mask="causal")).counts[kernel]
    array = run(replace(call, mask=mx.array(np.tri(256, dtype=bool)))).counts[kernel]
    assert array.device_read < plain.device_read + 256 * 256
