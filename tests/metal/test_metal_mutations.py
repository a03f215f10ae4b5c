"""Each fault planted in the kernels is noticed, by the emulator or by a wrong result.

This tests the checks. A fault that goes unnoticed here would also go unnoticed if a change of the kernels made it.
"""

import pytest
from flashattn_core.masks import KeyRange, SlidingWindow

from tests.metal.metal_attention import run
from tests.metal.planted_faults import BARRIER, BLOCKS, SHARED_BARRIER, Fault, assert_is_noticed, call
from tests.promises import promise

REG, TG, SPLIT = "metal_prefill_reg", "metal_prefill_tg", "metal_decode_split"
PARALLEL, FAST, ROWWISE = "metal_decode_parallel", "metal_decode_fast", "metal_rowwise"


def quantised_fault(kernel: str, old: str, new: str = "", *, bits: int = 8, dim: int = 64) -> Fault:
    lengths = (33, 71) if kernel in (REG, ROWWISE) else (1, 71)
    return Fault(kernel, old, new, lengths=lengths, mask=None, dim=dim, bits=bits)


FAULTS = {
    # Barriers. If a barrier's line has a comment, the comment identifies the barrier.
    "reg: values before keys are read": Fault(REG, BARRIER + "  // the keys have been read"),
    "reg: keys before the previous values are read": Fault(REG, BARRIER + "  // the previous values have been read"),
    "reg: values before they are there": Fault(REG, BARRIER + "  // the values are there"),
    "reg: keys before they are there": Fault(REG, BARRIER, occurrence=1),
    "reg: values cleaned before they are read": Fault(REG, BARRIER + "  // the values have been read", mask="NaN"),
    "reg: values read before they are clean": Fault(REG, BARRIER + "  // the values are clean", mask="NaN"),
    "tg: softmax before the scores are there": Fault(TG, BARRIER, occurrence=0),
    "tg: output before the probabilities are there": Fault(TG, BARRIER, occurrence=1),
    "tg: division before the sums are there": Fault(TG, BARRIER, occurrence=2),
    "tg: one score buffer instead of two": Fault(TG, "turn = 1 - turn", "turn = 0"),
    "rowwise: keys before they are there": Fault(ROWWISE, SHARED_BARRIER, occurrence=1),
    "rowwise: values over values": Fault(ROWWISE, SHARED_BARRIER, occurrence=2),
    "parallel: merge before the partial results are there": Fault(PARALLEL, BARRIER, occurrence=1),
    "parallel: a pass over the previous one": Fault(PARALLEL, BARRIER, occurrence=0, dim=256),
    "split: a tile over the previous one": Fault(SPLIT, SHARED_BARRIER, occurrence=0, lengths=(8, 70)),
    "split: tiles before they are there": Fault(SPLIT, SHARED_BARRIER, occurrence=1, lengths=(8, 70)),
    "reg: a barrier in a branch": Fault(REG, BARRIER + "  // the values are there", "if (own.end > first) " + BARRIER),
    # Accesses out of bounds.
    "loader: one row too many": Fault(REG, "columns, row < rows", "columns, row <= rows", mask=None),
    "loader: one column too many": Fault(REG, "first + i < columns", "first + i <= columns", dim=39),
    "reg: rows beyond the last": Fault(REG, "if (!whole_rows && row.query >= params.query_len)", "if (false)"),
    "reg: columns beyond the last": Fault(REG, "if (COLUMNS == columns || column < columns)", "if (true)", dim=37),
    "decode: a key too many": Fault(
        FAST, "head_dim, WHOLE || k < count", "head_dim, WHOLE || k <= count", lengths=(1, 71)
    ),
    "split: a chunk too many": Fault(SPLIT, "if (chunk >= split.num_chunks)", "if (chunk > split.num_chunks)"),
    "split: padding rows": Fault(
        SPLIT, "if (position.query < params.query_len) {  //", "if (true) {  //", lengths=(5, 70)
    ),
    "tg: a key too many": Fault(TG, "metal::min(row + 1, rows - 1)", "row + 1", lengths=(33, 71), mask=None),
    # Masks.
    "causal: one key too many": Fault(REG, "diagonal + 1", "diagonal + 2"),
    "window: one key too few": Fault(TG, "- params->window + 1", "- params->window + 2", mask=SlidingWindow(9)),
    "a span's begin ignored": Fault(
        ROWWISE, "row.seen.contains(key, 1)", "key < row.seen.end", mask=SlidingWindow(9) & KeyRange(3)
    ),
    "tree: aligned at the start": Fault(
        SPLIT, "query + params->tree_size - params->query_len", "query", lengths=(5, 70), mask="tree"
    ),
    "bool array: its head stride ignored": Fault(PARALLEL, "head * params->visible.head + ", "", mask="bool"),
    "additive array: in the wrong unit": Fault(REG, "score + bias", "score + M_LN2_F * bias", mask="additive"),
    "partly visible tiles taken for whole ones": Fault(REG, "all.contains(first, KEYS)", "all.contains(first, 1)"),
    # The block map.
    "reg: shown blocks left out": Fault(REG, "if (!(blocks & kBlockShows))", "if (blocks & kBlockShows)", **BLOCKS),
    "reg: a block that hides some taken for whole": Fault(REG, " && !(blocks & kBlockChanges)", "", **BLOCKS),
    "tg: a block that hides some taken for whole": Fault(TG, " && !(blocks & kBlockChanges)", "", **BLOCKS),
    "rowwise: a block that hides some taken for whole": Fault(ROWWISE, " && !(blocks & kBlockChanges)", "", **BLOCKS),
    "map: the first head's": Fault(REG, "head * params->block_map.head + ", "", **BLOCKS),
    "map: the first batch element's": Fault(
        REG, "inputs.block_map += batch_offset", "inputs.block_map += 0 * batch_offset", **BLOCKS
    ),
    "map: one row of blocks": Fault(REG, "row <= last_query / kBlockSize", "row <= first_query / kBlockSize", **BLOCKS),
    "map: one block too few": Fault(TG, "block <= last_key / kBlockSize", "block < last_key / kBlockSize", **BLOCKS),
    "hidden eights: one too many left out": Fault(
        REG, "first < end && begin < first + count", "first < end - 1 && begin < first + count", lengths=(33, 66)
    ),
    # Options.
    "softcap ignored": Fault(TG, "? rounded_product(params->softcap, scaled)", "? scaled", options={"softcap": 1.5}),
    "ALiBi's sign": Fault(FAST, "score -= row.slope", "score += row.slope", options={"alibi_slopes": True}),
    "sinks twice": Fault(
        SPLIT, "+= softmax.probability(sink)", "+= 2 * softmax.probability(sink)", options={"sinks": True}
    ),
    "the head of a group": Fault(REG, "head / (params.num_heads / params.num_kv_heads)", "head % params.num_kv_heads"),
    # The online softmax.
    "output not rescaled": Fault(REG, "output[c] *= rescale;"),
    "sum not rescaled": Fault(ROWWISE, "row_sum *= rescale;"),
    "decode: output not rescaled": Fault(FAST, "output[r][i] *= rescale;"),
    "merge: chunks not weighed": Fault(SPLIT, "FLASHATTN_LANE_VALUE(weight, c)", "1.0f"),
    "parallel: partial results not weighed": Fault(PARALLEL, "weight * partial_output", "partial_output"),
    "nothing visible: -inf - -inf": Fault(REG, "row_max == -INFINITY ? 0.0f : row_max", "row_max", lengths=(70, 33)),
    "lse in base 2": Fault(TG, "multiply_add(M_LN2_F, precise_log2", "multiply_add(1.0f, precise_log2"),
    # Wrong elements in a lane or threadgroup.
    "fragments: rows of a row-major layout": Fault(REG, "(lane >> 1 & 3) | (lane >> 2 & 4)", "lane >> 2"),
    "fragments: columns of a row-major layout": Fault(TG, "(lane & 1) * 2 | (lane >> 3 & 1) * 4", "(lane & 3) * 2"),
    "rows: a wrong neighbour": Fault(REG, "simd_shuffle_xor(x, ushort(8))", "simd_shuffle_xor(x, ushort(2))"),
    "keys not transposed": Fault(
        REG, "(k * 8 + fragment_c) * STRIDE + d * 8 + fragment_r", "(k * 8 + fragment_r) * STRIDE + d * 8 + fragment_c"
    ),
    "merge: a lane for a column": Fault(
        PARALLEL, "(i * FLASHATTN_LANES + int(lane)) * kStride", "(i + int(lane)) * kStride", dim=64
    ),
    "hidden NaN: weighs 0 instead of nothing": Fault(REG, "if (!finite_tile) {", "if (false) {", mask="NaN"),
    "decode, hidden NaN: weighs 0 instead of nothing": Fault(FAST, "unmasked || scores[r][k] != 0", "true", mask="NaN"),
    # Quantised keys and values: element = scale * q + bias.
    "bias ignored": quantised_fault(REG, "float(q), scale_and_bias.y)", "float(q), 0.0f)"),
    "the next element's bits": quantised_fault(SPLIT, " & ((1u << quant_bits) - 1)", bits=4),
    "bits within a byte not shifted": quantised_fault(SPLIT, "return bits >> (first % 8)", "return bits", bits=6),
    "bytes the other way round": quantised_fault(ROWWISE, "<< (b * 8)", "<< (8 - b * 8)", bits=5),
    "one byte too few": quantised_fault(PARALLEL, "first % 8 + count > b * 8", "count > b * 8", bits=3),
    "one byte too many": quantised_fault(FAST, "first % 8 + count > b * 8", "first % 8 + count >= b * 8", bits=3),
    "bytes of a word": quantised_fault(ROWWISE, "int(index / 4))) + index % 4", "int(index / 4)))"),
    "one group a row": quantised_fault(REG, "int index = column / group_size", "int index = 0"),
    "a run in two groups": quantised_fault(FAST, "COUNT & -COUNT", "COUNT", dim=96),
    "a lane's group of the first row": quantised_fault(FAST, "2 * (row * groups + ", "2 * ("),
    "a lane's group not its column's": quantised_fault(SPLIT, "(first + i) / group_size", "0"),
    "a bias for a scale": quantised_fault(PARALLEL, "bool has_scale = lane % 2 == 0", "bool has_scale = lane % 2 == 1"),
    "a group too many": quantised_fault(SPLIT, "row < count ? load_float", "row <= count ? load_float"),
    "a key too many": quantised_fault(SPLIT, "        if (exists) {", "        if (true) {"),
    "half taken for bfloat": quantised_fault(REG, "dtype == 1 ?", "dtype == 3 ?"),
    "offsets of scales in elements": quantised_fault(
        SPLIT, "scale_layout.offset(row, 0) * size_of_dtype(group_dtype)", "scale_layout.offset(row, 0)"
    ),
    "scales of the first head": quantised_fault(PARALLEL, " + head * scale_strides.head"),
    "biases of the first batch element": quantised_fault(ROWWISE, "batch_offset(params, bias_strides, batch) + "),
    "values with the keys' scales": quantised_fault(REG, "stored.value_scales,", "stored.key_scales,"),
    "values with the keys' biases' strides": quantised_fault(
        FAST, "params.value_scales, params.value_biases", "params.value_scales, params.key_biases"
    ),
}


@promise("faults planted in Metal's kernels are noticed")
@pytest.mark.rotate(6)
@pytest.mark.parametrize("name", FAULTS)
def test_is_noticed(rng, name):
    assert_is_noticed(FAULTS[name], lambda edit: call(FAULTS[name], rng, edit, run))
