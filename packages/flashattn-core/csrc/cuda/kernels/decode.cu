// The kernel cuda_decode is for few queries and many keys. Its rows are the queries of all heads that share a key/value
// head, so one read of a key serves up to 16 rows. A block computes up to ROWS rows over a chunk of keys. Its warps
// divide the chunk's tiles among them. Each warp loads into its own ring of stages, and waits for no other warp.
#include "integer_rows.h"
#include "split_keys.h"

using namespace flashattn;

// ROWS: rows per block, 16 or 8. KEYS: keys per tile. STAGES: tiles per ring. K: type of keys and values. A block
// computes ROWS rows of one chunk, for one key/value head of one batch element.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL decode(const cuda::Arguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, ROWS = Sizes::rows, WARPS = Sizes::warps, KEYS = Sizes::keys,
                STAGES = Sizes::stages;
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_SPLIT_ARGUMENTS;
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kThreads = WARPS * FLASHATTN_LANES;
  using Queries = SharedTile<T, ROWS, D>;
  using Tiles = CopiedTiles<K, KEYS, D, DV, STAGES, FLASHATTN_LANES>;
  extern __shared__ __align__(1024) uchar shared[];

  BlockPosition block = block_position(params, params.num_kv_heads);
  int batch = block.batch, kv_head = block.head, group = params.num_heads / params.num_kv_heads;
  int all_rows = group * params.query_len, row_blocks = (all_rows + ROWS - 1) / ROWS;
  int chunk = block.part / row_blocks, first_row = block.part % row_blocks * ROWS;
  int row_count = minimum(ROWS, all_rows - first_row);
  int lane = lane_index(), warp = warp_index();

  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  KeySpan any = seen_in_chunk(visibility, split, chunk);
  KeySpan all = intersection(any, visibility.seen_by_all(0, params.query_len - 1));

  Queries queries = {shared_address(shared)};
  Tiles tiles = {queries.memory + (is_quantised<K> ? 0 : Queries::kBytes) + warp * Tiles::kBytes,
                 keys_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head),
                 values_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head), lane_index()};
  constexpr int kStep = is_quantised<K> ? KEYS : has_bias ? 2 : 1;  // a pair of an additive array begins at an even key
  int origin = any.begin / kStep * kStep;
  const auto first_key = [&](int tile) { return origin + (tile * WARPS + warp) * KEYS; };
  const auto row_at = [&](uint row) {
    RowPosition position = row_position(first_row + row, kv_head, group);
    return position.query < params.query_len ? row_of(query, params, params.query, batch, position.head, position.query)
                                             : nullptr;
  };
  int64_t step = row_layout(params.query).column;
  AttendingRows<T, K, ROWS, D, DV, KEYS> rows;
  if constexpr (is_quantised<K>) {
    rows.read_queries([&](int row) { return row_at(minimum(row, row_count - 1)); }, step, lane);
  }
  FLASHATTN_ROLLED
  for (int tile = 0; tile < STAGES - 1; ++tile) {
    tiles.load(tile, first_key(tile), any.end);
    if constexpr (!is_quantised<K>) {
      if (tile == 0) queries.template load_rows<kThreads>(row_at, step, head_dim, threadIdx.x);
    }
    commit_copies();
  }
  rows.begin(visibility, first_row, kv_head, group, lane);
  if constexpr (is_quantised<K>) {
    rows.take_queries(lane);
  } else {
    rows.queries = queries;
  }
  FLASHATTN_UNROLL
  for (int h = 0; h < rows.kOwn; ++h) rows.rows[h].seen = intersection(rows.rows[h].seen, any);
  if constexpr (!is_quantised<K>) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // the queries are there
  }

  for (int tile = 0; first_key(tile) < any.end; ++tile) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();  // the tile has arrived, and all lanes have read the previous tile
    tiles.load(tile + STAGES - 1, first_key(tile + STAGES - 1), any.end);
    commit_copies();
    bool unmasked = all.contains(first_key(tile), KEYS);
    rows.template attend<2>(tiles, tile, visibility, first_key(tile), unmasked, lane);
  }
  rows.finish(visibility);

  // From here on, the warps' results replace the queries and tiles in shared memory.
  wait_for_copies<0>();
  __syncthreads();
  float* results = reinterpret_cast<float*>(shared);  // WARPS x rows x pitch
  OnlineSoftmax* sums = reinterpret_cast<OnlineSoftmax*>(results + WARPS * ROWS * rows.kPitch);
  FLASHATTN_UNROLL
  for (int h = 0; h < rows.kOwn; ++h) {
    int row = rows.own_row(h, lane), place = warp * ROWS + row;
    if (row < row_count) {
      if (rows.is_first(lane)) sums[place] = rows.softmax[h];
      rows.leave_row(results + place * rows.kPitch, h, lane);
    }
  }
  __syncthreads();
  bool finite = true;
  for (int at = threadIdx.x; at < row_count * kSlices; at += kThreads) {
    int row = at / kSlices, column = at % kSlices * kSlice;
    MergedSlice merged;
    merged.merge<WARPS>(WARPS, [&](int part, OnlineSoftmax& softmax, Slice& slice) {
      softmax = sums[part * ROWS + row];
      slice = *reinterpret_cast<const Slice*>(results + (part * ROWS + row) * rows.kPitch + column);
    });
    FLASHATTN_UNROLL
    for (int i = 0; i < kSlice; ++i) finite &= is_finite(merged.slice.columns[i]);
    RowPosition position = row_position(first_row + row, kv_head, group);
    if (split.num_chunks == 1) {
      store_slice(merged, column, FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, position);
      continue;
    }
    int64_t index = partial_index(params, split, batch, position.head, position.query, chunk);
    *reinterpret_cast<Slice*>(partials.out + index * value_dim + column) = merged.slice;
    if (column == 0) {
      partials.max[index] = merged.softmax.row_max;
      partials.sum[index] = merged.softmax.row_sum;
    }
  }
  // If a row is not finite, recomputes all rows of the block without tensor cores, see attend_again().
  if (!__syncthreads_and(finite)) {
    for (int row = warp; row < row_count; row += WARPS) {
      auto exact = attended_row<whole_lanes(head_dim), whole_lanes(value_dim)>(
          query, FLASHATTN_STORED_INPUTS(K), visibility, batch, kv_head, row_position(first_row + row, kv_head, group),
          any, all, lane);
      if (split.num_chunks == 1) {
        store_row(exact, FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, lane);
      } else {
        store_partials(exact, partials, params, split, batch, chunk, lane);
      }
    }
  }
  if (split.num_chunks == 1) return;
  uint* arrived = arrivals + (batch * params.num_kv_heads + kv_head) * row_blocks + first_row / ROWS;
  if (is_last(arrived, split.num_chunks)) {
    merge_chunks<kThreads>(FLASHATTN_ROW_OUTPUTS(T), params, sinks, partials, split, batch, kv_head, first_row,
                           row_count);
  }
}
