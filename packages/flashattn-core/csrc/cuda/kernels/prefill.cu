// cuda_prefill: many queries of one head. Each warp has 16 rows. Keys and values go by in tiles: while the tensor cores
// work on one, the next is on its way to the other half of shared memory.
#include "kernel.h"
#include "stored_rows.h"
#include "warp_rows.h"

using namespace flashattn;

// D: head_dim rounded up to whole steps of the tensor cores; DV: value_dim likewise. KEYS: of a tile. PARTS: of
// probabilities. Blocks: heads and batch elements for each WARPS * 16 queries.
template <typename T, int D, int DV, int WARPS, int KEYS, int PARTS>
FLASHATTN_KERNEL prefill(const cuda::Arguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kRows = WARPS * kWarpRows, kThreads = WARPS * FLASHATTN_LANES;
  using Queries = SharedTile<T, kRows, D>;
  using Keys = SharedTile<T, KEYS, D>;
  using Values = SharedTile<T, KEYS, DV>;
  extern __shared__ __align__(1024) uchar shared[];

  // The last queries first: under a causal mask they see the most keys, and a long block should not start last.
  BlockPosition block = block_position(params, params.num_heads);
  int first_query = ((params.query_len - 1) / kRows - block.part) * kRows;
  int last_query = minimum(first_query + kRows, params.query_len) - 1;
  int batch = block.batch, head = block.head, kv_head = head / (params.num_heads / params.num_kv_heads);
  int lane = lane_index(), own_row = int(warp_index()) * kWarpRows, own_query = first_query + own_row;
  int own_last = minimum(own_query + kWarpRows - 1, last_query);

  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  KeySpan any = visibility.seen_by_any(first_query, last_query);
  KeySpan own_any = visibility.seen_by_any(own_query, own_last);
  KeySpan own_all = visibility.seen_by_all(own_query, own_last);

  auto keys = keys_of(FLASHATTN_STORED_INPUTS(T), params, batch, kv_head);
  auto values = values_of(FLASHATTN_STORED_INPUTS(T), params, batch, kv_head);
  const auto key_tile = [&](int stage) {
    return Keys{shared_address(shared) + Queries::kBytes + stage * Keys::kBytes};
  };
  const auto value_tile = [&](int stage) {
    return Values{shared_address(shared) + Queries::kBytes + 2 * Keys::kBytes + stage * Values::kBytes};
  };
  const auto bring = [&](int first, int stage) {
    key_tile(stage).template load<kThreads>(keys.from(first).data, keys.layout, params.key_len - first, head_dim,
                                            threadIdx.x);
    value_tile(stage).template load<kThreads>(values.from(first).data, values.layout, params.key_len - first, value_dim,
                                              threadIdx.x);
  };

  Queries queries = {shared_address(shared)};
  RowLayout query_layout = row_layout(params.query);
  queries.template load<kThreads>(
      head_of(query, params, params.query, batch, head) + query_layout.offset(first_query, 0), query_layout,
      params.query_len - first_query, head_dim, threadIdx.x);
  int first = any.begin / KEYS * KEYS;
  if (first < any.end) bring(first, 0);
  commit_copies();

  WarpRows<T, DV, KEYS> rows;
  rows.begin(visibility, own_query, head, 1, lane);
  for (int stage = 0; first < any.end; first += KEYS, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and the other one has been read
    if (first + KEYS < any.end) bring(first + KEYS, stage ^ 1);
    commit_copies();
    if (own_any.meets(first, KEYS)) {
      Fragment scores[KEYS / 8];
      multiply_keys(scores, queries, own_row, key_tile(stage), lane);
      rows.rescale(rows.to_probabilities(scores, visibility, first, own_all.contains(first, KEYS), lane));
      add_values<PARTS>(rows.output, scores, value_tile(stage), lane);
    }
  }
  uint spoilt = rows.store(FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, lane);
  attend_again(spoilt, FLASHATTN_ROW_OUTPUTS(T), query, FLASHATTN_STORED_INPUTS(T), visibility, sinks, batch, head,
               own_query, lane);
}
