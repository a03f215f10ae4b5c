// Computes delta and saved_rows for each query.
#include "gradient_block.h"

using namespace flashattn;

// Computes ROWS dot products on LANES lanes: a[r] . b[r] for each r. Always sums in the same order.
template <int LANES, int ROWS, typename A, typename T>
struct ProductsOfRows {
  static constexpr int kAtOnce = 16 / sizeof(T);

  template <typename U>
  struct alignas(16) Piece {
    U numbers[kAtOnce];
  };

  const A* a[ROWS];
  const T* b[ROWS];
  int64_t a_step, b_step;

  // Reads 16 bytes at a time where alignment allows. In each step, all loads are issued before a result is used.
  FLASHATTN_FUNC void sum(float (&sums)[ROWS], int lane) const {
    unsigned long long addresses = 0;
    FLASHATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      addresses |= reinterpret_cast<unsigned long long>(a[r]) | reinterpret_cast<unsigned long long>(b[r]);
    }
    if (a_step == 1 && b_step == 1 && addresses % 16 == 0 && value_dim % kAtOnce == 0) {
      add<true>(sums, lane);
    } else {
      add<false>(sums, lane);
    }
    FLASHATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) sums[r] = lane_sum<LANES>(sums[r]);
  }

 private:
  template <bool WHOLE, typename U>
  static FLASHATTN_FUNC Piece<U> load(const U* row, int64_t step, int column) {
    if constexpr (WHOLE) {
      return *reinterpret_cast<const Piece<U>*>(row + column);
    } else {
      Piece<U> piece;
      FLASHATTN_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        piece.numbers[i] = column + i < value_dim ? row[(column + i) * step] : U(0.0f);
      }
      return piece;
    }
  }

  // WHOLE: whether one load reads several neighbouring numbers.
  template <bool WHOLE>
  FLASHATTN_FUNC void add(float (&sums)[ROWS], int lane) const {
    FLASHATTN_UNROLL
    for (int column = lane * kAtOnce; column < value_dim; column += LANES * kAtOnce) {
      Piece<A> of_a[ROWS];
      Piece<T> of_b[ROWS];
      FLASHATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        of_a[r] = load<WHOLE>(a[r], a_step, column);
        of_b[r] = load<WHOLE>(b[r], b_step, column);
      }
      FLASHATTN_UNROLL
      for (int i = 0; i < ROWS * kAtOnce; ++i) {
        int r = i / kAtOnce, e = i % kAtOnce;
        sums[r] = multiply_add(float(of_a[r].numbers[e]), float(of_b[r].numbers[e]), sums[r]);
      }
    }
  }
};

// The type of the array `out`, which is exact_out if the call has it.
template <typename T, bool HAS_EXACT_OUT>
struct SavedOut {
  using Number = T;
};
template <typename T>
struct SavedOut<T, true> {
  using Number = float;
};

// Eight lanes share two queries. Each head and batch element has one block per WARPS * 8 queries, counting the padding
// of saved_rows.
template <typename T, typename Sizes>
FLASHATTN_KERNEL backward_delta(const cuda::BackwardArguments& arguments) {
  constexpr int WARPS = Sizes::warps;
  using Out = typename SavedOut<T, has_exact_out>::Number;
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_VALUE(BackwardParams, backward);
  FLASHATTN_READ(Out, out);
  FLASHATTN_READ(T, dout);
  FLASHATTN_READ(float, dlse);
  FLASHATTN_READ(float, row_stats);
  FLASHATTN_WRITTEN(float, delta);
  FLASHATTN_WRITTEN(float4, saved_rows);
  constexpr int kLanes = 8, kRows = 2, kStep = WARPS * FLASHATTN_LANES / kLanes;
  BlockPosition block = block_position(params, params.num_heads);
  int batch = block.batch, head = block.head, lane = threadIdx.x % kLanes;
  int first = block.part * kStep * kRows + int(threadIdx.x) / kLanes;
  ProductsOfRows<kLanes, kRows, Out, T> products = {{}, {}, params.out.column, backward.dout.column};
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
  sum -= head_of(dlse, params, backward.dlse, batch, head)[minimum(query, params.query_len - 1) * backward.dlse.row];
  float* of_head = delta + delta_offset(params, batch, head);
  if (query < params.query_len) of_head[query] = sum;
  saved_rows[saved_offset(params, batch, head) + query] =
      stored_row(saved_row(head_of(row_stats, params, params.row_stats, batch, head), of_head, params, query));
}
