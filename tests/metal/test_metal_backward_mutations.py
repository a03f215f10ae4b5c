"""Each fault planted in the backward kernels is noticed, by the emulator or by a wrong result."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.masks import SlidingWindow

from tests.core.gradient_oracle import assert_obeys_the_rule, draw_call
from tests.metal.metal_backward import exactly_saved, run
from tests.metal.planted_faults import BARRIER, BLOCKS, Fault, assert_is_noticed, blocks
from tests.promises import promise

DQ, DKV, DELTA = "metal_backward_dq", "metal_backward_dkv", "metal_backward_delta"
FAULTS = {
    # Barriers.
    "dq: values over keys that are still read": Fault(DQ, BARRIER + "  // the previous keys have been read"),
    "dq: values before they are there": Fault(DQ, BARRIER + "  // the values are there"),
    "dq: keys over values that are still read": Fault(DQ, BARRIER + "  // the values have been read"),
    "dq: keys before they are there": Fault(DQ, BARRIER + "  // the keys are there"),
    "dq: keys cleaned before they are read": Fault(DQ, BARRIER + "  // the keys have been read", mask="NaN"),
    "dq: keys read before they are clean": Fault(DQ, BARRIER + "  // the keys are clean", mask="NaN"),
    "dkv: rows over rows that are still read": Fault(DKV, BARRIER + "  // the previous rows have been read"),
    "dkv: rows before they are there": Fault(DKV, BARRIER + "  // the rows are there"),
    "dkv: rows cleaned before they are read": Fault(DKV, BARRIER + "  // the rows have been read", mask="NaN"),
    "dkv: rows read before they are clean": Fault(DKV, BARRIER + "  // the rows are clean", mask="NaN"),
    # Accesses out of bounds.
    "dq: rows beyond the last": Fault(DQ, "if (!whole_rows && row.query >= params.query_len)", "if (false)"),
    "dkv: keys beyond the last": Fault(DKV, "if (!whole_keys && own_key >= params.key_len)", "if (false)"),
    "dkv: lse of rows beyond the last": Fault(DKV, "if (query >= params.query_len)", "if (false)"),
    "delta: rows beyond the last": Fault(DELTA, "if (query >= params.query_len)", "if (false)", occurrence=1),
    # Wrong formulas.
    "a score above the maximum": Fault(DQ, "x > 0 ? 0.0f : x", "x", mask="rounded"),
    "delta: dlse's sign": Fault(DELTA, "sum -= head_of", "sum += head_of"),
    "delta left out": Fault(DQ, "dprobability - saved.delta", "dprobability"),
    "softcap: no derivative": Fault(DKV, ") * derivative;", ");", options={"softcap": 1.5}),
    "softcap: another derivative": Fault(DQ, "(1 - tanh) * (1 + tanh)", "(1 - tanh)", options={"softcap": 1.5}),
    "dq not scaled": Fault(DQ, "store_row<D>(target, sums, params.scale", "store_row<D>(target, sums, 1.0f"),
    "dk not scaled": Fault(DKV, "dk_sums, params.scale", "dk_sums, 1.0f"),
    "dv scaled": Fault(DKV, "dv_sums, 1.0f", "dv_sums, params.scale"),
    "the sum in the wrong unit": Fault(DKV, "precise_log2(row_sum)", "M_LN2_F * precise_log2(row_sum)"),
    "dkv: a head of the group left out": Fault(DKV, "head < (kv_head + 1) * heads", "head + 1 < (kv_head + 1) * heads"),
    "dkv: another group's heads": Fault(DKV, "int head = kv_head * heads;", "int head = kv_head;"),
    # Masks.
    "no infinity: a row that sees nothing": Fault(DKV, "row_sum == 0", "false", mask="no sum"),
    "dkv: one query too few under causal": Fault(
        DKV, "maximum(0, first - offset)", "maximum(0, first - offset + 1)", lengths=(128, 129)
    ),
    "dkv: a window too short": Fault(
        DKV, "last) - offset + params->window", "last) - offset + params->window - 1", mask=SlidingWindow(34),
        lengths=(128, 128),
    ),
    "dkv: masks ignored": Fault(DKV, "unmasked(first, last).contains(first_key, kKeys)", "keys.contains(0, 1)"),
    "dq: masks ignored": Fault(DQ, "all.contains(first, KEYS)", "all.contains(first, 1)"),
    "dq: a block that hides some taken for whole": Fault(DQ, " && !(blocks & kBlockChanges)", "", **BLOCKS),
    "dkv: a block that hides some taken for whole": Fault(DKV, "!(blocks & kBlockChanges)", "true", **BLOCKS),
    "dq: shown blocks left out": Fault(DQ, "if (!(blocks & kBlockShows))", "if (blocks & kBlockShows)", **BLOCKS),
    "dkv: shown blocks left out": Fault(DKV, "if (!(blocks & kBlockShows))", "if (blocks & kBlockShows)", **BLOCKS),
    "dkv: eights left out": Fault(DKV, "min(eighth + 7, last)", "min(eighth, last)"),
    "dkv: padding rows in whole tiles": Fault(DKV, "row_count == ROWS && ", "", mask="infinite key"),
    "dq, hidden NaN: weighs 0 instead of nothing": Fault(DQ, "if (!finite_tile) {", "if (false) {", mask="NaN"),
    "dkv, hidden NaN: weighs 0 instead of nothing": Fault(DKV, "if (!finite_tile) {", "if (false) {", mask="NaN"),
    "dkv: only one of two tiles checked": Fault(DKV, "finite_queries && finite_dout", "finite_queries", mask="NaN"),
    "hidden NaN in the products": Fault(DQ, "unmasked || probability != 0 ? gradient", "true ? gradient", mask="NaN"),
    # Wrong elements in a lane or threadgroup.
    "dkv: dv in dk's sums": Fault(DKV, "sums + (PARTS == 1 ? kDepth : 0)", "sums"),
    "dkv, in two parts: the wrong one": Fault(DKV, "group.x % 2 == 0", "group.x % 2 == 1", dim=160, lengths=(33, 40)),
}  # fmt: skip


def check(fault: Fault, rng: np.random.Generator, edit, run=run) -> None:
    """Runs the fault's call with `run`, which is a backend's backward pass. Raises if the fault is noticed."""
    length, key_len = fault.query_and_key_lengths
    sizes = {"length": length, "key_len": key_len, "dim": fault.dim, "dtype": fault.dtype}
    call = replace(draw_call(rng, batch=(2,), heads=6, kv_heads=2, **sizes), **fault.options)
    if fault.mask == "NaN":  # NaN in a key and a value that no row sees, and in dout of a row that sees nothing
        call = replace(call, mask=(mx.arange(key_len) != 20) & (mx.arange(length) != 10)[:, None])
        key, row = (mx.arange(key_len) == 20)[:, None], (mx.arange(length) == 10)[:, None]
        at = {"key": key, "value": key, "dout": row}
        poisoned = replace(call, **{name: mx.where(where, mx.nan, getattr(call, name)) for name, where in at.items()})
        assert_obeys_the_rule(call, run(poisoned, saved=exactly_saved(call), edit=edit))
    elif fault.mask == "no sum":
        out, lse, row_stats = exactly_saved(call)
        blind = mx.arange(length) == 10
        saved = out, lse, mx.where(blind[:, None], mx.array([-mx.inf, 0]), row_stats)
        got = run(call, saved=saved, edit=edit)
        assert not got.dq[:, :, 10].any()
        call = replace(call, mask=mx.broadcast_to(~blind[:, None], (length, key_len)))
        assert_obeys_the_rule(call, got)
    elif fault.mask == "infinite key":  # the key's scores are all -inf, so it has no weight
        query = mx.abs(call.query) + 0.1
        key = mx.where((mx.arange(key_len) == 20)[:, None], -mx.inf, call.key)
        assert not mx.isnan(run(replace(call, query=query, key=key), edit=edit).dv).any()
    elif fault.mask == "rounded":
        # The saved maximum is at least 8 units in the last place too small, as if scores were rounded differently. A
        # unit in the last place of a score is at most 64.
        call = replace(call, scale=1e7)
        out, lse, row_stats = exactly_saved(call)
        below = row_stats[..., 0] - 8 * 64
        saved = out, lse, mx.stack([below, row_stats[..., 1]], axis=-1)
        assert np.isfinite(np.asarray(run(call, saved=saved, edit=edit).dq)).all()
    else:
        call = replace(call, mask=mx.array(blocks(length, key_len)) if fault.mask == "blocks" else fault.mask)
        assert_obeys_the_rule(call, run(call, edit=edit))


@promise("faults planted in Metal's gradients are noticed")
@pytest.mark.rotate(6)
@pytest.mark.parametrize("name", FAULTS)
def test_is_noticed(rng, name):
    assert_is_noticed(FAULTS[name], lambda edit: check(FAULTS[name], rng, edit))
