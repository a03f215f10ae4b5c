// cuda_decode: few queries, many keys. The rows are the queries of all heads that share a key/value head, so that 16 of
// them read a key and a value once. A block has 16 rows and a chunk of the keys. Its warps take tiles of it in turns,
// each with a ring of tiles of its own, so that nothing in the loop waits for another warp.
#include "split_keys.h"
#include "warp_rows.h"

using namespace flashattn;

// Leaves one of a lane's two rows in shared memory. Rows are `kPitch` apart, so that the lanes of a store, of 8 rows of
// two columns or of two rows of four, are in different banks.
template <typename K, int DV>
constexpr int kPitch = DV + (kApart<K> <= 2 ? 8 : 4);
template <typename K, int DV, int N>
FLASHATTN_FUNC void leave_row(float* row, const Fragment (&output)[N], int h, int lane) {
  FLASHATTN_UNROLL
  for (int c = 0; c < DV / 8; c += kApart<K>) {  // whose columns are neighbours
    float* to = row + output_column<K>(c, lane);
    const auto column = [&](int i) { return output[c + i % kApart<K>][2 * h + i / kApart<K>]; };
    if constexpr (kApart<K> == 1) {
      *reinterpret_cast<float2*>(to) = {column(0), column(1)};
    } else {
      FLASHATTN_UNROLL
      for (int i = 0; i < 2 * kApart<K>; i += 4) {
        *reinterpret_cast<float4*>(to + i) = {column(i), column(i + 1), column(i + 2), column(i + 3)};
      }
    }
  }
}

// ROWS: of a block, 8 or 16. KEYS: of a tile. STAGES: tiles of a ring. Blocks: kv_heads and batch elements for each
// ROWS rows of each chunk.
template <typename T, int D, int DV, int ROWS, int WARPS, int KEYS, int STAGES, typename K = T>
FLASHATTN_KERNEL decode(const cuda::Arguments& arguments) {
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
  Tiles tiles = {queries.memory + Queries::kBytes + warp * Tiles::kBytes,
                 keys_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head),
                 values_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head), lane_index()};
  const auto first_key = [&](int tile) { return any.begin + (tile * WARPS + warp) * KEYS; };
  tiles.bring(0, first_key(0), any.end);
  const auto row_at = [&](uint row) {
    RowPosition position = row_position(first_row + row, kv_head, group);
    return position.query < params.query_len ? row_of(query, params, params.query, batch, position.head, position.query)
                                             : nullptr;
  };
  load_query_rows<K, kThreads>(queries, row_at, params.query.column, threadIdx.x);
  commit_copies();
  FLASHATTN_UNROLL
  for (int tile = 1; tile < STAGES - 1; ++tile) {
    tiles.bring(tile, first_key(tile), any.end);
    commit_copies();
  }
  WarpRows<T, DV, KEYS, K, ROWS> rows;
  rows.begin(visibility, first_row, kv_head, group, lane);
  FLASHATTN_UNROLL
  for (int h = 0; h < rows.kOwn; ++h) rows.rows[h].seen = intersection(rows.rows[h].seen, any);
  wait_for_copies<STAGES - 2>();
  __syncthreads();  // the queries are there
  auto own = queries_for<K>(queries, lane);

  for (int tile = 0; first_key(tile) < any.end; ++tile) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();  // the tile is there, and the one before has been read
    tiles.bring(tile + STAGES - 1, first_key(tile + STAGES - 1), any.end);
    commit_copies();
    Fragment scores[KEYS / 8] = {};
    multiply_keys(scores, own, tiles.keys(tile), lane);
    bool shown = all.contains(first_key(tile), KEYS);
    rows.rescale(rows.to_probabilities(scores, visibility, first_key(tile), shown, lane));
    add_values<2, rows.kOwn>(rows.output, scores, tiles.values(tile), lane);
  }

  if constexpr (is_quantised<K>) add_biases<DV>(rows.output, lane);
  // The warps' results meet in shared memory, where the tiles were.
  wait_for_copies<0>();
  __syncthreads();
  float* results = reinterpret_cast<float*>(shared);  // WARPS x rows x pitch
  OnlineSoftmax* sums = reinterpret_cast<OnlineSoftmax*>(results + WARPS * ROWS * kPitch<K, DV>);
  FLASHATTN_UNROLL
  for (int h = 0; h < rows.kOwn; ++h) {
    int row = lane / 4 + h * kRowStep, place = warp * ROWS + row;
    rows.softmax[h].row_sum = lane_sum<kRowLanes>(rows.softmax[h].row_sum);
    if (row < row_count) {
      if (lane % 4 == 0) sums[place] = rows.softmax[h];
      leave_row<K, DV>(results + place * kPitch<K, DV>, rows.output, h, lane);
    }
  }
  __syncthreads();
  bool finite = true;
  for (int at = threadIdx.x; at < row_count * kSlices; at += kThreads) {
    int row = at / kSlices, column = at % kSlices * kSlice;
    MergedSlice merged;
    merged.merge<WARPS>(WARPS, [&](int part, OnlineSoftmax& softmax, Slice& slice) {
      softmax = sums[part * ROWS + row];
      slice = *reinterpret_cast<const Slice*>(results + (part * ROWS + row) * kPitch<K, DV> + column);
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
  // See attend_again().
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
