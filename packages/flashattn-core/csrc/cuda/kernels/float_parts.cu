// Splits float32 keys and values, or queries and dout, into three bfloat16 parts. Each part is contiguous, for the TMA.
#include "float_parts.h"

#include "kernel.h"

using namespace flashattn;

template <typename T>
struct ToParts {
  const T* from;
  const Strides& strides;
  uint4* to;
};

// D and DV: head_dim and value_dim, rounded up to 8. The rows of `first` have head_dim columns, and the rows of
// `second` have value_dim. A thread splits eight elements of one array, and writes 16 bytes of each part.
template <int D, int DV, typename T>
FLASHATTN_FUNC void split_rows(const AttentionParams& params, ToParts<T> first, ToParts<T> second, int heads,
                               int length) {
  constexpr int kOfFirst = D / 8, kOfBoth = kOfFirst + DV / 8;
  int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, number = thread / kOfBoth;
  int piece = int(thread % kOfBoth), row = int(number % length), head = int(number / length % heads);
  int batch = int(number / length / heads);
  if (batch >= params.batch_size) return;
  bool of_first = piece < kOfFirst;
  if (!of_first) piece -= kOfFirst;
  const ToParts<T>& array = of_first ? first : second;
  auto rows = rows_of(array.from, params, array.strides, batch, head);
  EightInParts eight(rows, row, piece * 8, of_first ? head_dim : value_dim, true);
  FLASHATTN_UNROLL
  for (int part = 0; part < Operand<T>::kParts; ++part) {
    int64_t tile = (int64_t(batch) * Operand<T>::kParts + part) * heads + head;
    array.to[(tile * length + row) * (of_first ? kOfFirst : kOfBoth - kOfFirst) + piece] = eight.parts[part];
  }
}

template <typename T, typename Sizes>
FLASHATTN_KERNEL float_parts(const cuda::Arguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim;
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_WRITTEN(uint4, key_parts);
  FLASHATTN_WRITTEN(uint4, value_parts);
  split_rows<D, DV>(params, ToParts<T>{key, params.key, key_parts}, ToParts<T>{value, params.value, value_parts},
                    params.num_kv_heads, params.key_len);
}

template <typename T, typename Sizes>
FLASHATTN_KERNEL float_parts_of_queries(const cuda::BackwardArguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim;
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_VALUE(BackwardParams, backward);
  FLASHATTN_READ(T, dout);
  FLASHATTN_WRITTEN(uint4, query_parts);
  FLASHATTN_WRITTEN(uint4, dout_parts);
  split_rows<D, DV>(params, ToParts<T>{query, params.query, query_parts}, ToParts<T>{dout, backward.dout, dout_parts},
                    params.num_heads, params.query_len);
}
