"""Each fault planted in the CUDA kernels is noticed, by the emulator or by a wrong result.

CUDA's and Metal's kernels share the text in csrc/gpu. test_metal_mutations.py plants faults in most of it.
"""

import mlx.core as mx
import pytest
from flashattn_core.masks import KeyRange, SlidingWindow

from tests.cuda import cuda_attention
from tests.metal.planted_faults import BLOCKS, Fault, assert_is_noticed, call
from tests.promises import promise

PREFILL, DECODE, ROWWISE, HOPPER = "cuda_prefill", "cuda_decode", "cuda_rowwise", "cuda_prefill_hopper"


def of_decode(old: str, new: str = "", *, length: int = 1, key_len: int = 300, **how) -> Fault:
    return Fault(DECODE, old, new, lengths=(length, key_len), **how)


# Sizes with which a warp of cuda_decode has more than one tile.
FEW_WARPS = {"key_len": 700, "dim": 200}
# In these calls, scores grow so much from tile to tile that the sums of a row must be rescaled.
GROWING = {"lengths": (33, 140), "options": {"scale": 1.0}}
GROWING_STEPS = GROWING | {"lengths": (16, 3000)}

# The first 64 queries (those of one warpgroup) do not see keys 60 to 199. The other queries see these keys.
GAP = (mx.arange(300) < 60) | (mx.arange(300) >= 200) | (mx.arange(150)[:, None] >= 64)


def of_hopper(old: str, new: str = "", **how) -> Fault:
    return Fault(HOPPER, old, new, **{"lengths": (150, 300), "dtype": "float16"} | how)


def of_parts(old: str, new: str = "", **how) -> Fault:
    return Fault(HOPPER, old, new, lengths=(150, 300), **how)


def of_integers(old: str, new: str = "", **how) -> Fault:
    return Fault(DECODE, old, new, **{"lengths": (5, 310), "dim": 64, "dtype": "float16", "bits": 4} | how)


def of_dequantised(old: str, new: str = "", **how) -> Fault:
    return Fault(PREFILL, old, new, **{"lengths": (70, 150), "dim": 64, "dtype": "float16", "bits": 4} | how)


WAIT = "wait_for_copies<0>();"
WAIT_FOR_TILE = "wait_for_copies<STAGES - 2>();\n    "
FAULTS = {
    # Barriers and asynchronous copies.
    "prefill: a tile before it is there, or over one being read": Fault(PREFILL, "__syncthreads();  // the tile", "//"),
    "prefill: a tile not waited for": Fault(PREFILL, WAIT + "\n    __syncthreads();", "__syncthreads();"),
    "prefill: one stage instead of two": Fault(PREFILL, "n % STAGES * kStage", "0"),
    "prefill: copies not committed": Fault(PREFILL, "any.end);\n    commit_copies();", "any.end);"),
    "decode: queries before they are there": of_decode("__syncthreads();  // the queries are there"),
    "decode: queries not waited for": of_decode(WAIT_FOR_TILE + "__syncthreads();", "__syncthreads();"),
    "decode: a tile not waited for": of_decode(WAIT_FOR_TILE + "__syncwarp", "__syncwarp", **FEW_WARPS),
    "decode: waited for too few": of_decode(
        "STAGES - 2>();\n    __syncwarp", "STAGES - 1>();\n    __syncwarp", **FEW_WARPS
    ),
    "decode: a tile over one being read": of_decode("load(tile + STAGES - 1, ", "load(tile + STAGES, ", **FEW_WARPS),
    "decode: results over tiles": of_decode(WAIT + "\n  __syncthreads();", WAIT),
    "decode: results before they are there": of_decode("  __syncthreads();\n  bool finite", "  bool finite"),
    "decode: results over each other": of_decode("kPitch = DV + (", "kPitch = DV - ("),
    "decode: a chunk alone is not written": of_decode(
        "if (split.num_chunks == 1) {\n      store_slice", "if (false) {\n      store_slice", key_len=100
    ),
    "merge: not behind a fence": of_decode("__threadfence();  // before the block", "//"),
    "merge: before all warps have written": of_decode(
        "  __syncthreads();\n  bool last = thread", "  bool last = thread", mask="NaN"
    ),
    "merge: the last but one merges": of_decode("uint(count - 1)", "uint(count - 2)"),
    "merge: arrivals are left": of_decode("if (last) *arrived = 0;"),
    "merge: one count for all heads": of_decode("(batch * params.num_kv_heads + kv_head) *", "0 *"),
    "merge: one count for all rows": of_decode(" + first_row / ROWS", length=16),
    # Accesses out of bounds.
    "tile: a row too many": Fault(PREFILL, "int(row) < count", "int(row) <= count", mask=None, lengths=(33, 71)),
    "tile: a column too many": Fault(PREFILL, "e < count ? from", "e <= count ? from", dim=39),
    "prefill: rows beyond the last": Fault(
        PREFILL, "bool exists = query < params.query_len, finite", "bool exists = true, finite"
    ),
    "prefill: columns beyond the last": Fault(PREFILL, "if (column + kNext<T> < WIDTH)", "if (true)", dim=37),
    "decode: rows that are padding": of_decode(
        "return position.query < params.query_len ? row_of", "return true ? row_of", length=4
    ),
    "decode: the next chunk's keys": of_decode("key_rows, first, end, head_dim", "key_rows, first, end + 1, head_dim"),
    # Masks.
    "a span's begin ignored": of_decode(
        "row.seen.contains(key + e, 1)", "key + e < row.seen.end", length=8, mask=SlidingWindow(9) & KeyRange(3)
    ),
    "partly visible tiles taken for whole ones": Fault(
        PREFILL, "own_all.contains(first(), KEYS)", "own_all.contains(first(), 1)"
    ),
    "a warp's tiles left out": Fault(
        PREFILL, "(own_any.end - origin + KEYS - 1) / KEYS", "(own_any.end - origin) / KEYS", mask=SlidingWindow(9)
    ),
    # The block map, and the bits of a bool mask.
    "a mixed block taken for whole": Fault(PREFILL, "!(has_block_map && listed.changes(own_part))", "true", **BLOCKS),
    "a tile too far": Fault(PREFILL, "ListedTile{words[n]}", "ListedTile{words[n + 1]}", **BLOCKS),
    "a warp's rows see less": Fault(PREFILL, "listed.shows(own_part)", "listed.changes(own_part)", **BLOCKS),
    "hopper: output not rescaled behind a gap": of_hopper(
        "if (has_block_map) rows.rescale(first_rescaling);", dim=128, mask=GAP, options={"scale": 4.0}
    ),
    "bits of bytes in the wrong place": Fault(PREFILL, "0x204081", "0x102040", **BLOCKS),
    "bits of the other lanes": Fault(PREFILL, "own < 2 ? bits : others", "own < 2 ? others : bits", **BLOCKS),
    "a key beyond the last in the bits": Fault(PREFILL, "if (first + i < key_len) words", "if (true) words", **BLOCKS),
    "the head of a group": Fault(
        PREFILL, "kv_head = head / (params.num_heads / params.num_kv_heads)", "kv_head = head % params.num_kv_heads"
    ),
    # The online softmax.
    "output not rescaled": Fault(PREFILL, "output[i / 4][i % 4] *= rescaling.by[i % 4 / 2];", ";", **GROWING),
    "rescaled by the other row": Fault(PREFILL, "rescaling.by[i % 4 / 2]", "rescaling.by[1 - i % 4 / 2]", **GROWING),
    "key groups and chunks not weighed": of_decode("+= weight * slices[n]", "+= slices[n]"),
    "merge: sum not rescaled": of_decode("softmax.row_sum += weight * softmaxes", "softmax.row_sum += softmaxes"),
    # The first two faults show in large scores. The others use a wrong unit: a kernel may keep maxima and sums in
    # another unit than it saves them in.
    "large: not computed again": Fault(PREFILL, "lost ? 0 * INFINITY", "false ? 0 * INFINITY", options={"scale": 1e9}),
    "large: scores rounded in one place": Fault(
        ROWWISE,
        "(score - reference()) * M_LOG2E_F",
        "multiply_add(score, M_LOG2E_F, -reference() * M_LOG2E_F)",
        options={"scale": 1e9},
    ),
    "sums not from the maximum": Fault(PREFILL, "sum * from_max[h]", "sum", dtype="float16"),
    "output not from the maximum": of_decode("from[0][2 * h] * factor,", "from[0][2 * h],", dtype="float16"),
    "prefill: output not from the maximum": Fault(
        PREFILL, "result.normalise * from_max[h]", "result.normalise", dtype="float16"
    ),
    "additive array: maxima in the unit of products": Fault(
        PREFILL, "kUnit = has_bias ? M_LOG2E_F : 1", "kUnit = 1", mask="additive", **GROWING
    ),
    # Wrong elements in a lane or warp.
    "a row's maximum of one lane": Fault(PREFILL, "lane_max<LANES, STEP>(score", "(score", **GROWING),
    "a row's sum of more lanes": Fault(PREFILL, "lane_sum<LANES, STEP>(softmax", "lane_sum<2 * LANES, STEP>(softmax"),
    "keys as rows of operand a": Fault(PREFILL, "lane % 8 + lane / 16 * 8, lane / 8 % 2", "lane % 16, lane / 16"),
    "the swizzle of another row": Fault(PREFILL, "(odd ^ row % 8) << 4", "(odd ^ row % 4) << 4"),
    "columns of the output": Fault(PREFILL, "c / 4 * 32 + lane % 4 * 8 + c % 4", "c * 8 + lane % 4 * 2"),
    "the small parts of keys forgotten": Fault(PREFILL, "multiply_add_tile<T>(small[j], a, b_small[0], b_small[1]);"),
    "small parts of probabilities forgotten": Fault(PREFILL, "multiply_add_tile<T>(sums[c], a_small, b0[c], b1[c]);"),
    "hidden NaN: rows are not attended again": Fault(
        PREFILL, "attend_again(not_finite,", "attend_again(0 * not_finite,", mask="NaN"
    ),
    "hidden NaN: other rows are attended again": Fault(PREFILL, "<< Own::own_row(h, lane)", "<< h", mask="NaN"),
    "decode, hidden NaN: chunks are not attended again": of_decode(
        "if (!__syncthreads_and(finite))", "if (!__syncthreads_and(true))", mask="NaN"
    ),
    # Quantised keys and values.
    "integers of the next element": of_integers("e * kBits - kUp", "(e ^ 1) * kBits - kUp"),
    "integers of a wider mask": of_integers("((1u << kBits) - 1) << kUp", "((2u << kBits) - 1) << kUp"),
    "queries as they lie": of_integers("element(e + kApart)", "element((e + kApart) % 3)"),
    "a group's sum of two lanes": of_integers("lane_sum<4>(sum)", "lane_sum<2>(sum)"),
    "the sum of another query": of_integers("query_sums[h][g], g == 0", "query_sums[0][g], g == 0"),
    "scales of another key": of_integers("scales.of(key, g), product", "scales.of(0, g), product"),
    "scales of the first group": of_integers("scales.of(key, g), product", "scales.of(key, 0), product"),
    "keys in the order of rows": of_integers("return row % 8 * 4 + row / 8;", "return row;"),
    "integers: not rescaled": of_integers(
        "output[c / 2][h / 2][c % 2 * 2 + h % 2] *= rescaling.by[h];", **GROWING_STEPS
    ),
    "value biases not rescaled": of_integers("bias_sums[h][g] *= rescaling.by[h];", ";", **GROWING_STEPS),
    "probabilities not transposed": of_integers("= transposed(parts[key][b][part])", "= parts[key][b][part]"),
    "value biases forgotten": of_integers("multiply_add(p[0], bias, ", "multiply_add(p[0], 0, "),
    "value biases of four keys": of_integers("lane_sum<8, 4>(bias_sums[h][g])", "bias_sums[h][g]"),
    "value biases of one group": of_integers("lane_sum<8, 4>(bias_sums[h][g])", "lane_sum<8, 4>(bias_sums[h][0])"),
    "a row's sum of four keys": of_integers("lane_sum<LANES, STEP>(softmax", "(softmax"),
    "the small parts of integers forgotten": of_integers(
        "for (int part = 0; part < 2; ++part) {", "for (int part = 1; part < 2; ++part) {"
    ),
    "scales that are not there": of_integers("copy_async(memory + at,", "if (false) copy_async(memory + at,"),
    # The last head's scales begin at a multiple of 16 bytes, and do not end at one.
    "scales beyond the last key": of_integers("clamped(count * kRow - at, 0, 16)", "16", batch_and_kv_heads=(1, 1)),
    "words beyond the last key": of_integers("count >= kIntegerKeys || key + keys < count", "true"),
    "scales that begin anywhere": of_integers("begins % 16 == 0", "true"),
    "dequantised: one tile for all parts": of_dequantised("kStage + part * Keys::kBytes", "kStage"),
    "dequantised: keys of another head": of_dequantised(
        "KEY_PARTS * heads + kv_head) * len", "KEY_PARTS * heads) * len"
    ),
    "dequantised: small parts of keys forgotten": of_dequantised(
        "int part = 0; part < Tiles::kKeyParts", "int part = 1; part < Tiles::kKeyParts"
    ),
    "dequantised: small parts of values forgotten": of_dequantised(
        "if (Tiles::kValueParts == 2) add", "if (false) add"
    ),
    "dequantised: one array for all parts": of_dequantised("+ part) * heads", ") * heads", source="float_parts"),
    # Hopper: barriers in shared memory, tensor maps, products of warpgroups.
    "hopper: queries before they are there": of_hopper("if (!kFresh) queries_arrived.wait(0);"),
    "hopper: keys before they are there": of_hopper(
        "keys.wait_for_tile(n, part);\n      if (part == 0)", "if (part == 0)"
    ),
    "hopper: values before they are there": of_hopper("values.wait_for_tile(n, part);\n        begin", "begin"),
    "hopper: a tile over one that is read": of_hopper("if (turn >= STAGES) read(turn).wait(turn / STAGES - 1);"),
    "hopper: room a turn too early": of_hopper("read(turn).wait(turn / STAGES - 1)", "read(turn).wait(turn / STAGES)"),
    "hopper: keys given back while they are read": of_hopper(
        "wait_for_products<kValueParts>(scores);\n      keys.release(next.n);",
        "keys.release(next.n);\n      wait_for_products<kValueParts>(scores);",
    ),
    "hopper: scores not waited for": of_hopper("wait_for_products<kValueParts>(scores);"),
    "hopper: output not waited for": of_hopper("wait_for_products<0>(sums);"),
    "hopper: a tile never given back": of_hopper("rows.add(sums);\n      values.release(n);", "rows.add(sums);"),
    "hopper: a warp less reads": of_hopper("keys.initialise(kReaders)", "keys.initialise(kReaders - 1)"),
    "hopper: bytes of half a tile": of_hopper("arrive_and_expect(Tile::kBytes)", "arrive_and_expect(Tile::kBytes / 2)"),
    "hopper: a panel's columns": of_hopper("panel % kPanels * 64, row", "panel % kPanels * 32, row", dim=72),
    "hopper: rows of another group": of_hopper("queries, group * kWarpgroupRows, keys", "queries, 0, keys", dim=72),
    "hopper: values of another step": of_hopper("i * 16 * 128", "i * 8 * 128"),
    # Hopper's kernel for float32. It splits each number into 16-bit parts.
    "parts: those of queries forgotten": of_parts("PARTS - 1 > key_part ? PARTS - 1 - key_part : 0", "PARTS - 1"),
    "parts: those of probabilities forgotten": of_parts("VALUE_PARTS - 1 - value_part, count", "PARTS - 1, count"),
    "parts: one tile for all": of_parts("batch * PARTS + part, arrived", "batch * PARTS, arrived"),
    "parts: queries over each other": of_parts("row, piece) + part * Queries::kBytes", "row, piece)"),
    "parts: queries beyond the last": of_parts("first_row + row <= last_row", "true"),
    "parts: sums of the tile before": of_parts("fresh && value_part == 0", "false"),
    "parts: sums of the last tile alone": of_parts("output[i / 4][i % 4] += sums", "output[i / 4][i % 4] = sums"),
    "parts: one tile given back": of_parts("part < end; ++part) read", "part < 1; ++part) read"),
    "parts: keys beyond the last": of_parts(" && first_row + at < length;", ";", source="float_parts"),
    "parts: values of another row": of_parts("first_row + row) * kP", "first_row) * kP", source="float_parts"),
}


@promise("faults planted in CUDA's kernels are noticed")
@pytest.mark.rotate(12)
@pytest.mark.usefixtures("requires_clang")
@pytest.mark.parametrize("name", FAULTS)
def test_is_noticed(rng, name):
    assert_is_noticed(FAULTS[name], lambda edit: call(FAULTS[name], rng, edit, cuda_attention.run))
