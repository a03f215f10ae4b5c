// cuda_backward_dq and cuda_backward_dkv, which are one text. A block has rows, and columns go by in tiles. For dq the
// rows are queries of a head and the columns its keys. For dk and dv the rows are keys, and the columns the queries of
// all heads that share them: so their gradients are summed here, always in the same order.
//
//   S = own query or key . columns'   dP = own dout or value . columns'   second += dS . columns' key or query
//                                                                         first += P . columns' dout
//
// first is dv, second dq or dk. P and dS stay in the registers that S and dP were in.
#include "gradient_rows.h"

using namespace flashattn;

// D: head_dim rounded up to whole steps of the tensor cores; DV: value_dim likewise. COLUMNS: of a tile. OF: a
// Gradient. Blocks: for dq heads and batch elements for each WARPS * 16 queries, else kv_heads and batch elements for
// each keys.
template <typename T, int D, int DV, int WARPS, int COLUMNS, int OF>
FLASHATTN_KERNEL backward(const cuda::BackwardArguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_BACKWARD_ARGUMENTS(T);
  constexpr bool kOfKeys = is_of_keys(OF), kFirst = has_first(OF), kSecond = has_second(OF);
  constexpr int kRows = WARPS * kWarpRows, kThreads = WARPS * FLASHATTN_LANES;
  using Own = CopiedTiles<T, kRows, D, DV, 1, kThreads>;
  using Tiles = CopiedTiles<T, COLUMNS, D, DV, 2, kThreads>;
  extern __shared__ __align__(1024) uchar shared[];

  BlockPosition block = block_position(params, kOfKeys ? params.num_kv_heads : params.num_heads);
  int group = params.num_heads / params.num_kv_heads, kv_head = kOfKeys ? block.head : block.head / group;
  int first_head = kOfKeys ? kv_head * group : block.head, heads = kOfKeys ? group : 1;
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, block.batch);
  GradientRows<T, OF> problem = {visibility, backward, query, key, value, dout, row_stats, delta, block.batch, kv_head};

  int row_count = problem.row_count(),
      first_row = kOfKeys ? block.part * kRows : first_query(params, block.part, kRows);
  int lane = lane_index(), own_row = int(warp_index()) * kWarpRows, own_first = first_row + own_row;
  int last_row = minimum(first_row + kRows, row_count) - 1, own_last = minimum(own_first + kWarpRows - 1, last_row);
  KeySpan any = problem.columns_of(first_row, last_row), own_any = problem.columns_of(own_first, own_last);
  int origin = any.begin / COLUMNS * COLUMNS;
  int tiles_of_head = any.begin < any.end ? (any.end - origin + COLUMNS - 1) / COLUMNS : 0;
  int count = tiles_of_head * heads;

  Own own = {shared_address(shared), problem.own_first(first_head), problem.own_second(first_head), threadIdx.x};
  own.bring(0, first_row, row_count);
  SavedRow* saved_columns = reinterpret_cast<SavedRow*>(shared + Own::kBytes + Tiles::kBytes);  // of two tiles
  const auto tiles_of = [&](int n) {
    int head = first_head + n / tiles_of_head;
    return Tiles{own.memory + Own::kBytes, problem.columns_first(head), problem.columns_second(head), threadIdx.x};
  };
  const auto bring = [&](int n) {
    if (n < count) tiles_of(n).bring(n, origin + n % tiles_of_head * COLUMNS, any.end);
    commit_copies();
  };
  const auto saved_column = [&](int n) {  // the thread's, of tile n
    int head = first_head + n / tiles_of_head;
    return problem.saved(head, origin + n % tiles_of_head * COLUMNS + int(threadIdx.x));
  };
  bool has_column = kOfKeys && threadIdx.x < COLUMNS;
  bring(0);
  if (has_column && count > 0) saved_columns[threadIdx.x] = saved_column(0);

  Row rows[2];
  SavedRow saved_rows[2];
  if (!kOfKeys) {
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      rows[h] = visibility.row(own_first + lane / 4 + h * kRowStep, first_head);
      saved_rows[h] = problem.saved(first_head, rows[h].query);
    }
  }
  Fragment first_sums[kFirst ? DV / 8 : 1] = {}, second_sums[kSecond ? D / 8 : 1] = {};
  for (int n = 0; n < count; ++n) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and the one before has been read
    bring(n + 1);
    bool brings = has_column && n + 1 < count;
    SavedRow next = brings ? saved_column(n + 1) : SavedRow{};
    int first = origin + n % tiles_of_head * COLUMNS, head = first_head + n / tiles_of_head;
    if (own_any.meets(first, COLUMNS)) {
      Tiles tiles = tiles_of(n);
      Fragment probabilities[COLUMNS / 8] = {}, gradients[COLUMNS / 8] = {};  // scores first, and what comes back
      multiply_keys(probabilities, own_rows(own.keys(0), own_row), tiles.keys(n), lane);
      if (kSecond) multiply_keys(gradients, own_rows(own.values(0), own_row), tiles.values(n), lane);
      float slope = has_alibi_slopes ? visibility.row(0, head).slope : 0.0f;
      const auto to_gradients = [&](bool shown) {
        FLASHATTN_UNROLL
        for (int i = 0; i < COLUMNS / 2; ++i) {
          int h = i % 4 / 2, in_tile = i / 4 * 8 + lane % 4 * 2 + i % 2, column = first + in_tile;
          Row row = kOfKeys ? visibility.row_with_slope(column, head, slope) : rows[h];
          SavedRow saved = kOfKeys ? saved_columns[n % 2 * COLUMNS + in_tile] : saved_rows[h];
          int key_index = kOfKeys ? own_first + lane / 4 + h * kRowStep : column;
          float &product = probabilities[i / 4][i % 4], &gradient = gradients[i / 4][i % 4];
          ScoreGradient result = score_gradient(product, gradient, visibility, row, saved, key_index, shown);
          product = result.probability;
          gradient = result.gradient;
        }
      };
      if (problem.all_see(own_first, first, COLUMNS)) {
        to_gradients(true);
      } else {
        to_gradients(false);
      }
      if constexpr (kFirst) add_values<2>(first_sums, probabilities, tiles.values(n), lane);
      if constexpr (kSecond) add_values<2>(second_sums, gradients, tiles.keys(n), lane);
    }
    if (brings) saved_columns[(n + 1) % 2 * COLUMNS + threadIdx.x] = next;
  }
  wait_for_copies<0>();  // where no column is seen, the rows are still on their way
  bool spoilt[2];
  FLASHATTN_UNROLL
  for (int h = 0; h < 2; ++h) {
    int row = own_first + lane / 4 + h * kRowStep;
    float probe = 0;  // becomes NaN with the first number that is not finite
    if constexpr (kFirst) probe += probe_of(first_sums, h);
    if constexpr (kSecond) probe += probe_of(second_sums, h);
    bool finite = lane_sum<kRowLanes>(probe) == 0;
    spoilt[h] = row <= last_row && !finite;
    if (row > last_row || spoilt[h]) continue;
    if constexpr (kFirst) store_columns(problem.first_row(dv, row), first_sums, h, 1.0f, value_dim, lane);
    if constexpr (kSecond) {
      store_columns(problem.second_row(kOfKeys ? dk : dq, first_head, row), second_sums, h, params.scale, head_dim,
                    lane);
    }
  }
  // A tensor core multiplies what is hidden by 0, and 0 times NaN is NaN. Such rows are computed again without it.
  FLASHATTN_UNROLL
  for (int h = 0; h < 2; ++h) {
    for (uint left = __ballot_sync(~0u, spoilt[h]) & 0x11111111; left != 0; left &= left - 1) {
      int row = own_first + (__ffs(left) - 1) / kRowLanes + h * kRowStep;
      problem.template compute_again<whole_lanes(head_dim), whole_lanes(value_dim)>(row, first_head, heads, dq, dk, dv,
                                                                                    lane);
    }
  }
}
