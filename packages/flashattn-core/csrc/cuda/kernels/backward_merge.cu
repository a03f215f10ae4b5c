// dk and dv, where blocks have left what some heads of a group add to them: summed in the heads' order.
#include "gradient_block.h"

using namespace flashattn;

template <typename T, int COLUMNS>
FLASHATTN_FUNC void merge_parts(const float* parts, int64_t step, int count, T* row, int lane) {
  constexpr int kAtOnce = COLUMNS % 4 == 0 ? 4 : 1;
  struct alignas(sizeof(float) * kAtOnce) Slice {
    float columns[kAtOnce];
  };
  FLASHATTN_UNROLL
  for (int column = lane * kAtOnce; column < COLUMNS; column += FLASHATTN_LANES * kAtOnce) {
    Slice sum = {};
    _Pragma("unroll 4") for (int n = 0; n < count; ++n) {
      Slice slice = *reinterpret_cast<const Slice*>(parts + n * step + column);
      FLASHATTN_UNROLL
      for (int i = 0; i < kAtOnce; ++i) sum.columns[i] += slice.columns[i];
    }
    FLASHATTN_UNROLL
    for (int i = 0; i < kAtOnce; ++i) row[column + i] = T(sum.columns[i]);
  }
}

// A warp has a row of each. Blocks: kv_heads and batch elements for each WARPS keys.
template <typename T, int WARPS>
FLASHATTN_KERNEL backward_merge(const cuda::BackwardArguments& arguments) {
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_VALUE(BackwardParams, backward);
  FLASHATTN_READ(float, dk_parts);
  FLASHATTN_READ(float, dv_parts);
  FLASHATTN_WRITTEN(T, dk);
  FLASHATTN_WRITTEN(T, dv);
  BlockPosition block = block_position(params, params.num_kv_heads);
  int key = block.part * WARPS + int(warp_index()), head = block.head, batch = block.batch;
  if (key >= params.key_len) return;
  int64_t row = (int64_t(batch) * params.num_kv_heads + head) * params.key_len + key;
  int64_t rows = int64_t(params.batch_size) * params.num_kv_heads * params.key_len;
  int chunks = head_chunks(params, backward);
  merge_parts<T, head_dim>(dk_parts + row * head_dim, rows * head_dim, chunks,
                           row_of(dk, params, backward.dk, batch, head, key), lane_index());
  merge_parts<T, value_dim>(dv_parts + row * value_dim, rows * value_dim, chunks,
                            row_of(dv, params, backward.dv, batch, head, key), lane_index());
}
