// Splits keys and values, or queries and dout, into 16-bit parts, see float_parts.h. Each part is contiguous, for the
// TMA. Keys and values may be quantised.
#include "float_parts.h"

#include "kernel.h"

using namespace flashattn;

// An array of 16-bit parts: PARTS arrays of this many heads, rows and columns per batch element.
template <typename E, int PARTS, int COLUMNS>
struct Parts {
  uint4* memory;
  int heads, length;

  // Splits eight elements of a row, which has `columns` elements without padding.
  template <typename Rows>
  FLASHATTN_FUNC void write(Rows rows, BlockPosition block, int row, int piece, int columns) const {
    EightInParts<E, PARTS> eight(rows, row, piece * 8, columns, true);
    FLASHATTN_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      int64_t head = (int64_t(block.batch) * PARTS + part) * heads + block.head;
      memory[(head * length + row) * (COLUMNS / 8) + piece] = eight.parts[part];
    }
  }
};

// D and DV: head_dim and value_dim, rounded up to 8. PARTS: parts of an element. ROWS: rows of a head per block.
// `first` and `second` are rows of the block's head, with head_dim and value_dim columns. In each step, a thread splits
// eight elements of one of them.
template <typename T, typename Sizes, typename First, typename Second>
FLASHATTN_FUNC void split_rows(BlockPosition block, First first, Second second, uint4* first_parts, uint4* second_parts,
                               int heads, int length) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, PARTS = Sizes::parts, ROWS = Sizes::rows;
  constexpr int kThreads = Sizes::warps * FLASHATTN_LANES, kOfFirst = D / 8, kOfBoth = kOfFirst + DV / 8;
  using Element = typename Operand<T>::Element;
  Parts<Element, PARTS, D> to_first = {first_parts, heads, length};
  Parts<Element, PARTS, DV> to_second = {second_parts, heads, length};
  FLASHATTN_UNROLL
  for (int n = 0; n < ROWS * kOfBoth; n += kThreads) {
    int at = n + int(threadIdx.x), row = block.part * ROWS + at / kOfBoth, piece = at % kOfBoth;
    if (at >= ROWS * kOfBoth || row >= length) return;
    if (piece < kOfFirst) {
      to_first.write(first, block, row, piece, head_dim);
    } else {
      to_second.write(second, block, row, piece - kOfFirst, value_dim);
    }
  }
}

template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL float_parts(const cuda::Arguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_WRITTEN(uint4, key_parts);
  FLASHATTN_WRITTEN(uint4, value_parts);
  BlockPosition block = block_position(params, params.num_kv_heads);
  auto stored = FLASHATTN_STORED_INPUTS(K);
  split_rows<T, Sizes>(block, keys_of(stored, params, block.batch, block.head),
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
  split_rows<T, Sizes>(block, rows_of(query, params, params.query, block.batch, block.head),
                       rows_of(dout, params, backward.dout, block.batch, block.head), query_parts, dout_parts,
                       params.num_heads, params.query_len);
}
