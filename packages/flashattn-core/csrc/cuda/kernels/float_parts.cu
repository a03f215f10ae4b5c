// Splits keys and values, or queries and dout, into 16-bit parts, see float_parts.h. Each part is contiguous, for the
// TMA. Keys and values may be quantised.
#include "float_parts.h"

#include "kernel.h"

using namespace flashattn;

// Splits ROWS rows of a head, from first_row on, into PARTS arrays of heads, rows and COLUMNS columns each. `columns`:
// the rows' columns without padding. THREADS threads, of which this is number `thread`, split eight elements at a time.
template <typename T, int PARTS, int ROWS, int COLUMNS, int THREADS, typename Rows>
FLASHATTN_FUNC void split_rows(Rows rows, uint4* to, BlockPosition block, int heads, int length, int columns,
                               int thread) {
  constexpr int kPieces = COLUMNS / 8, kAtOnce = THREADS / kPieces, kSteps = (ROWS + kAtOnce - 1) / kAtOnce;
  int piece = thread % kPieces, row = thread / kPieces, first_row = block.part * ROWS;
  const auto exists = [&](int step) {
    int at = step * kAtOnce + row;
    return row < kAtOnce && at < ROWS && first_row + at < length;
  };
  // All rows are loaded before any is written, because the compiler cannot tell that the arrays do not overlap.
  EightInParts<typename Operand<T>::Element, PARTS> eights[kSteps];
  rows = rows.from(first_row + row);
  FLASHATTN_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    eights[step].load(rows, 0, piece * 8, columns, exists(step));
    rows = rows.from(kAtOnce);
  }
  FLASHATTN_UNROLL
  for (int part = 0; part < PARTS; ++part) {
    int64_t head = (int64_t(block.batch) * PARTS + part) * heads + block.head;
    uint4* own = to + (head * length + first_row + row) * kPieces + piece;
    FLASHATTN_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (exists(step)) own[step * kAtOnce * kPieces] = eights[step].parts[part];
    }
  }
}

// D and DV: head_dim and value_dim, rounded up to 8. ROWS: rows of a head per block. Half of the threads split `first`,
// rows of head_dim columns. The others split `second`, rows of value_dim columns.
template <typename T, typename Sizes, typename First, typename Second>
FLASHATTN_FUNC void split_both(BlockPosition block, First first, Second second, uint4* first_parts, uint4* second_parts,
                               int heads, int length) {
  constexpr int kHalf = Sizes::warps * FLASHATTN_LANES / 2;
  int thread = threadIdx.x;
  if (thread < kHalf) {
    split_rows<T, Sizes::key_parts, Sizes::rows, Sizes::dim, kHalf>(first, first_parts, block, heads, length, head_dim,
                                                                    thread);
  } else {
    split_rows<T, Sizes::value_parts, Sizes::rows, Sizes::value_dim, kHalf>(second, second_parts, block, heads, length,
                                                                            value_dim, thread - kHalf);
  }
}

template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL float_parts(const cuda::Arguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_WRITTEN(uint4, key_parts);
  FLASHATTN_WRITTEN(uint4, value_parts);
  BlockPosition block = block_position(params, params.num_kv_heads);
  auto stored = FLASHATTN_STORED_INPUTS(K);
  split_both<T, Sizes>(block, keys_of(stored, params, block.batch, block.head),
                       values_of(stored, params, block.batch, block.head), key_parts, value_parts, params.num_kv_heads,
                       params.key_len);
}

template <typename T, typename Sizes>
FLASHATTN_KERNEL float_parts_of_queries(const cuda::BackwardArguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_VALUE(BackwardParams, backward);
  FLASHATTN_READ(T, dout);
  FLASHATTN_WRITTEN(uint4, query_parts);
  FLASHATTN_WRITTEN(uint4, dout_parts);
  BlockPosition block = block_position(params, params.num_heads);
  split_both<T, Sizes>(block, rows_of(query, params, params.query, block.batch, block.head),
                       rows_of(dout, params, backward.dout, block.batch, block.head), query_parts, dout_parts,
                       params.num_heads, params.query_len);
}
