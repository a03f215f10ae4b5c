"""Each fault planted in the CUDA kernels of the gradient is noticed, by the emulator or by a wrong result.

CUDA's and Metal's kernels share the text in csrc/gpu. test_metal_backward_mutations.py plants faults in most of it.
"""

import pytest

from tests import launches
from tests.cuda.cuda_attention import run_backward
from tests.metal import test_metal_backward_mutations as of_metal
from tests.metal.planted_faults import BLOCKS, Fault, assert_is_noticed

BACKWARD, HOPPER, PARTS, DELTA, MERGE = (
    f"cuda_backward{name}" for name in ("", "_hopper", "_parts", "_delta", "_merge")
)
LONG = {"lengths": (150, 300)}
WIDE = {"dtype": "float16", "dim": 136}  # 16-bit floats that are not split into parts
OPEN = "!(has_block_map && tile.listed.changes(own_part))"


def of_hopper(old: str, new: str = "", **how) -> Fault:
    return Fault(HOPPER, old, new, dtype="float16", **LONG | how)


def of_parts(old: str, new: str = "", **how) -> Fault:
    return Fault(PARTS, old, new, **{"dim": 72} | LONG | how)


FAULTS = {
    # Barriers and asynchronous copies.
    "a tile before it is there, or over one being read": Fault(BACKWARD, "__syncthreads();  // the tile", "//", **LONG),
    "a tile not waited for": Fault(BACKWARD, "wait_for_copies<0>();\n    __syncthreads();", "__syncthreads();", **LONG),
    "what is saved of the tile before": Fault(
        BACKWARD, "saved_columns + n % 2 * COLUMNS, tile", "saved_columns, tile", **LONG
    ),
    "hopper: rows before they are there": of_hopper("own_arrived.wait(0);"),
    "hopper: a tile before it is there": of_hopper("ring.wait_for_tile(n);"),
    "hopper: a tile over another": of_hopper("ring.expect(n);", "ring.arrived(n).arrive_and_expect(Columns::kBytes);"),
    "hopper: tiles are not released": of_hopper("ring.release(n);"),
    "hopper: without what is saved": of_hopper("if (Block::kOfKeys) copy_bytes", "if (false) copy_bytes"),
    "hopper: products not waited for": of_hopper(
        "wait_for_products<0>(first_sums);\n      wait_for_products<0>(second_sums);"
    ),
    "hopper: the last turn is not passed": of_hopper("if (n > 0) ping_pong.pass(lane);\n  block.store", dim=128),
    "hopper: P before S is there": of_hopper("wait_for_products<1>(scores);"),
    # Hopper's kernel for float32, which it splits into 16-bit parts, and for wide 16-bit arrays.
    "parts: rows before they are there": of_parts("own_arrived.wait(0);"),
    "parts: a tile before it is there": of_parts("ring.wait_for_tile(n, part);\n    begin_multiply", "begin_multiply"),
    "parts: a tile over one that is read": of_parts("if (turn >= STAGES) read(turn)", "if (false) read(turn)"),
    "parts: without what is saved": of_parts("copy_bytes(saved", "if (false) copy_bytes(saved"),
    "parts: what is saved of the tile before": of_parts("if (Block::kOfKeys) saved.wait_for_tile(n);"),
    "parts: one reader too few": of_parts("Block::kFirst ? kGroups * kWarps : kWarps", "kWarps"),
    "parts: one not released": of_parts("ring.release(n, 1, 2);"),
    "parts: one released before it is read": of_parts("wait_for_products<2>(of_tile);"),
    "parts: P before S is there": of_parts("wait_for_products<0>(scores);"),
    "parts: dS before dP is there": of_parts("wait_for_products<0>(dscores);"),
    "parts: P before it is given": of_parts("given.wait(n);"),
    "parts: P over P": of_parts("+ i * kWarpgroup + threadIdx", "+ threadIdx"),
    "parts: P over P that is not taken": of_parts("if (WAITS && n > 0) taken.wait(n - 1);", **WIDE),
    "parts, wide: a tile before it is there": of_parts("ring.wait_for_tile(n);\n    begin_add", "begin_add", **WIDE),
    "parts, wide: released before it is read": of_parts("wait_for_products<0>(sums);", **WIDE),
    "parts: products with the first part left out": of_parts(
        "for (int part = 0; part < 3; ++part) {\n      ring", "for (int part = 1; part < 3; ++part) {\n      ring"
    ),
    "parts: sums of the last tile alone": of_parts("sums[i / 4][i % 4] += of_tile", "sums[i / 4][i % 4] = of_tile"),
    "parts: own rows' are all the first": of_parts("batch * PARTS + panel / kPanels", "batch * PARTS"),
    "parts: columns as TF32 has them": of_parts("store_columns<E, head_dim", "store_columns<T, head_dim"),
    "parts: softcap in two steps": of_parts("has_softcap ? kBoth", "false ? kBoth", options={"softcap": 1.5}),
    # Accesses out of bounds.
    "rows beyond the last": Fault(BACKWARD, "row > last_row || not_finite[h]", "not_finite[h]"),
    "delta: rows beyond the last": Fault(DELTA, "minimum(first + r * kStep, params.query_len - 1)", "first + r"),
    "merge: keys beyond the last": Fault(MERGE, "if (key >= params.key_len) continue;"),
    # Wrong formulas.
    "a score above the maximum": Fault(
        BACKWARD, "at_most_zero(exponent_of(difference, saved))", "exponent_of(difference, saved)", mask="rounded"
    ),
    "one number for maximum and sum": Fault(
        DELTA, "return float4{saved.row_max, ", "return float4{saved.row_max + M_LN2_F * saved.log2_sum, "
    ),
    "delta: dlse's sign": Fault(DELTA, "sum -= head_of", "sum += head_of"),
    "hopper: softcap in two steps": of_hopper("constexpr (has_softcap)", "constexpr (false)", options={"softcap": 1.5}),
    "not scaled": Fault(BACKWARD, "second, h, params().scale", "second, h, 1.0f"),
    # Query heads that share a key/value head.
    "each block has the first heads": Fault(BACKWARD, "chunk = kOfKeys ? block.head % chunks : 0", "chunk = 0"),
    "merge: a part left out": Fault(MERGE, "int n = 0; n < count", "int n = 1; n < count"),
    "parts over each other": Fault(BACKWARD, "(chunk * int(params.batch_size) + batch)", "(chunk + batch)"),
    # Masks.
    "masks ignored": Fault(BACKWARD, "visibility.unmasked(first, last).contains", "KeySpan{0, 1 << 30}.contains"),
    # The block map, and the bits of a bool mask.
    "a block that hides some taken for whole": Fault(BACKWARD, OPEN, "true", **BLOCKS),
    "bits of the wrong keys": Fault(BACKWARD, "% 2) >> lane / 4", "% 2) >> lane % 4", **BLOCKS),
    "bits of the wrong queries": Fault(BACKWARD, "lane % 4 * 2 + n % 2) >>", "lane % 4 * 2) >>", **BLOCKS),
    "parts: bits of queries 32 further": of_parts("bits() << n * 16", "bits() << 0", **BLOCKS),
    "hidden NaN": Fault(BACKWARD, "not_finite[h] = row <= last_row && !finite", "not_finite[h] = false", mask="NaN"),
}  # fmt: skip


@pytest.mark.usefixtures("requires_clang")
@pytest.mark.rotate(6)
@pytest.mark.parametrize("name", FAULTS)
def test_is_noticed(rng, name):
    fault = FAULTS[name]
    with launches.shared_memory(227, 90 if fault.kernel in (HOPPER, PARTS) else 80):
        assert_is_noticed(fault, lambda edit: of_metal.check(fault, rng, edit, run_backward))
