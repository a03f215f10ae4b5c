// What of each row its gradients need: dq once, dk and dv for each tile.
#include "gradient_block.h"

using namespace flashattn;

// The sum of products of two rows, by LANES lanes: 16 bytes at a time, where they lie so. The order is always the same.
template <int LANES, typename T>
FLASHATTN_FUNC float product_of_rows(const T* a, int64_t a_step, const T* b, int64_t b_step, int lane) {
  constexpr int kAtOnce = 16 / sizeof(T);
  unsigned long long addresses = reinterpret_cast<unsigned long long>(a) | reinterpret_cast<unsigned long long>(b);
  bool wide = a_step == 1 && b_step == 1 && addresses % 16 == 0 && value_dim % kAtOnce == 0;
  float sum = 0;
  FLASHATTN_UNROLL
  for (int column = lane * kAtOnce; column < value_dim; column += LANES * kAtOnce) {
    float4 piece_of_a, piece_of_b;
    T *x = reinterpret_cast<T*>(&piece_of_a), *y = reinterpret_cast<T*>(&piece_of_b);
    if (wide) {
      piece_of_a = *reinterpret_cast<const float4*>(a + column);
      piece_of_b = *reinterpret_cast<const float4*>(b + column);
    } else {
      FLASHATTN_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        bool exists = column + i < value_dim;
        x[i] = exists ? a[(column + i) * a_step] : T(0.0f);
        y[i] = exists ? b[(column + i) * b_step] : T(0.0f);
      }
    }
    FLASHATTN_UNROLL
    for (int i = 0; i < kAtOnce; ++i) sum = multiply_add(float(x[i]), float(y[i]), sum);
  }
  return lane_sum<LANES>(sum);
}

// Eight lanes have a row. Blocks: heads and batch elements for each WARPS * 4 queries of whole tiles.
template <typename T, int WARPS>
FLASHATTN_KERNEL backward_delta(const cuda::BackwardArguments& arguments) {
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_VALUE(BackwardParams, backward);
  FLASHATTN_READ(T, out);
  FLASHATTN_READ(T, dout);
  FLASHATTN_READ(float, dlse);
  FLASHATTN_READ(float, row_stats);
  FLASHATTN_WRITTEN(float, delta);
  FLASHATTN_WRITTEN(float4, saved_rows);
  constexpr int kLanes = 8;
  BlockPosition block = block_position(params, params.num_heads);
  int batch = block.batch, head = block.head, lane = threadIdx.x % kLanes;
  int query = block.part * (WARPS * FLASHATTN_LANES / kLanes) + int(threadIdx.x) / kLanes;
  int read = minimum(query, params.query_len - 1);
  float sum = product_of_rows<kLanes>(
      head_of(out, params, params.out, batch, head) + read * params.out.row, params.out.column,
      head_of(dout, params, backward.dout, batch, head) + read * backward.dout.row, backward.dout.column, lane);
  if (has_dlse) sum -= head_of(dlse, params, backward.dlse, batch, head)[read * backward.dlse.row];
  if (lane != 0) return;
  float* of_head = delta + delta_offset(params, batch, head);
  if (query < params.query_len) of_head[query] = sum;
  saved_rows[saved_offset(params, batch, head) + query] =
      stored_row(saved_row(head_of(row_stats, params, params.row_stats, batch, head), of_head, params, query));
}
