// Computes delta and saved_rows for each query.
#include "gradient_block.h"

using namespace flashattn;

// Computes ROWS dot products on LANES lanes: a[r] . b[r] for each r. Always sums in the same order.
template <int LANES, int ROWS, typename T>
struct ProductsOfRows {
  static constexpr int kAtOnce = 16 / sizeof(T);

  const T *a[ROWS], *b[ROWS];
  int64_t a_step, b_step;

  // Reads 16 bytes at a time where alignment allows. In each step, all loads are issued before a result is used.
  FLASHATTN_FUNC void sum(float (&sums)[ROWS], int lane) const {
    unsigned long long addresses = 0;
    FLASHATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      addresses |= reinterpret_cast<unsigned long long>(a[r]) | reinterpret_cast<unsigned long long>(b[r]);
    }
    if (a_step == 1 && b_step == 1 && addresses % 16 == 0 && value_dim % kAtOnce == 0) {
      add(sums, lane, [](const T* row, int64_t, int column) { return *reinterpret_cast<const float4*>(row + column); });
    } else {
      add(sums, lane, [](const T* row, int64_t step, int column) {
        float4 piece;
        FLASHATTN_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          reinterpret_cast<T*>(&piece)[i] = column + i < value_dim ? row[(column + i) * step] : T(0.0f);
        }
        return piece;
      });
    }
    FLASHATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) sums[r] = lane_sum<LANES>(sums[r]);
  }

 private:
  template <typename F>
  FLASHATTN_FUNC void add(float (&sums)[ROWS], int lane, F load) const {
    FLASHATTN_UNROLL
    for (int column = lane * kAtOnce; column < value_dim; column += LANES * kAtOnce) {
      float4 of_a[ROWS], of_b[ROWS];
      FLASHATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        of_a[r] = load(a[r], a_step, column);
        of_b[r] = load(b[r], b_step, column);
      }
      FLASHATTN_UNROLL
      for (int i = 0; i < ROWS * kAtOnce; ++i) {
        int r = i / kAtOnce, e = i % kAtOnce;
        const T *x = reinterpret_cast<const T*>(&of_a[r]), *y = reinterpret_cast<const T*>(&of_b[r]);
        sums[r] = multiply_add(float(x[e]), float(y[e]), sums[r]);
      }
    }
  }
};

// Eight lanes share two queries. Each head and batch element has one block per WARPS * 8 queries, counting the padding
// of saved_rows.
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
  constexpr int kLanes = 8, kRows = 2, kStep = WARPS * FLASHATTN_LANES / kLanes;
  BlockPosition block = block_position(params, params.num_heads);
  int batch = block.batch, head = block.head, lane = threadIdx.x % kLanes;
  int first = block.part * kStep * kRows + int(threadIdx.x) / kLanes;
  ProductsOfRows<kLanes, kRows, T> products = {{}, {}, params.out.column, backward.dout.column};
  FLASHATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    int read = minimum(first + r * kStep, params.query_len - 1);
    products.a[r] = head_of(out, params, params.out, batch, head) + read * params.out.row;
    products.b[r] = head_of(dout, params, backward.dout, batch, head) + read * backward.dout.row;
  }
  float sums[kRows] = {};
  products.sum(sums, lane);
  if (lane >= kRows) return;  // each of the first kRows lanes writes one row
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
