// Computes delta and saved_rows for each query.
#include "gradient_block.h"

using namespace flashattn;

// Eight lanes compute the products of two rows of out and dout, in a fixed order. Blocks: one per head and batch
// element for every WARPS * 8 queries, and for the padding of saved_rows.
template <typename T, typename Sizes>
FLASHATTN_KERNEL backward_delta(const cuda::BackwardArguments& arguments) {
  constexpr int WARPS = Sizes::warps;
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_VALUE(BackwardParams, backward);
  FLASHATTN_READ(T, out);
  FLASHATTN_READ(T, dout);
  FLASHATTN_READ(float, dlse);
  FLASHATTN_READ(float, row_stats);
  FLASHATTN_WRITTEN(float, delta);
  FLASHATTN_WRITTEN(float4, saved_rows);
  constexpr int kLanes = 8, kRows = 2, kStep = WARPS * FLASHATTN_LANES / kLanes, kAtOnce = 16 / sizeof(T);
  BlockPosition block = block_position(params, params.num_heads);
  int batch = block.batch, head = block.head, lane = threadIdx.x % kLanes;
  int first = block.part * kStep * kRows + int(threadIdx.x) / kLanes;
  const T *outs[kRows], *douts[kRows];
  unsigned long long addresses = 0;
  FLASHATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    int read = minimum(first + r * kStep, params.query_len - 1);
    outs[r] = head_of(out, params, params.out, batch, head) + read * params.out.row;
    douts[r] = head_of(dout, params, backward.dout, batch, head) + read * backward.dout.row;
    addresses |= reinterpret_cast<unsigned long long>(outs[r]) | reinterpret_cast<unsigned long long>(douts[r]);
  }
  float sums[kRows] = {};
  // load(row, step, column) reads 16 bytes of a row. All loads are issued before the first result is used.
  const auto add_products = [&](auto load) {
    FLASHATTN_UNROLL
    for (int column = lane * kAtOnce; column < value_dim; column += kLanes * kAtOnce) {
      float4 of_out[kRows], of_dout[kRows];
      FLASHATTN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        of_out[r] = load(outs[r], params.out.column, column);
        of_dout[r] = load(douts[r], backward.dout.column, column);
      }
      FLASHATTN_UNROLL
      for (int i = 0; i < kRows * kAtOnce; ++i) {
        int r = i / kAtOnce, e = i % kAtOnce;
        const T *x = reinterpret_cast<const T*>(&of_out[r]), *y = reinterpret_cast<const T*>(&of_dout[r]);
        sums[r] = multiply_add(float(x[e]), float(y[e]), sums[r]);
      }
    }
  };
  if (params.out.column == 1 && backward.dout.column == 1 && addresses % 16 == 0 && value_dim % kAtOnce == 0) {
    add_products([](const T* row, int64_t, int column) { return *reinterpret_cast<const float4*>(row + column); });
  } else {
    add_products([](const T* row, int64_t step, int column) {
      float4 piece;
      FLASHATTN_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        reinterpret_cast<T*>(&piece)[i] = column + i < value_dim ? row[(column + i) * step] : T(0.0f);
      }
      return piece;
    });
  }
  FLASHATTN_UNROLL
  for (int r = 0; r < kRows; ++r) sums[r] = lane_sum<kLanes>(sums[r]);
  if (lane >= kRows) return;  // each of the first lanes writes one row
  int query = first + lane * kStep;
  float sum = lane == 0 ? sums[0] : sums[1];
  if (has_dlse) {
    sum -= head_of(dlse, params, backward.dlse, batch, head)[minimum(query, params.query_len - 1) * backward.dlse.row];
  }
  float* of_head = delta + delta_offset(params, batch, head);
  if (query < params.query_len) of_head[query] = sum;
  saved_rows[saved_offset(params, batch, head) + query] =
      stored_row(saved_row(head_of(row_stats, params, params.row_stats, batch, head), of_head, params, query));
}
