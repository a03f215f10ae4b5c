// cuda_decode: few queries, many keys. The rows are the queries of all heads that share a key/value head, so that 16 of
// them read a key and a value once. A block has 16 rows and a chunk of the keys. Its warps take tiles of it in turns,
// each with a ring of tiles of its own, so that nothing in the loop waits for another warp.
#include "split_keys.h"
#include "warp_rows.h"

using namespace flashattn;

// Leaves one of a lane's two rows in shared memory. Rows are `kPitch` apart, so that the lanes of a store, of 8 rows of
// two columns or of two rows of four, are in different banks.
template <typename T, int DV>
constexpr int kPitch = DV + (sizeof(T) == 2 ? 8 : 4);
template <typename T, int DV>
FLASHATTN_FUNC void leave_row(float* row, const Fragment (&output)[DV / 8], int h, int lane) {
  constexpr int kStep = sizeof(T) == 2 ? 1 : 4;  // see output_column()
  FLASHATTN_UNROLL
  for (int c = 0; c < DV / 8; c += kStep) {
    if constexpr (kStep == 1) {
      *reinterpret_cast<float2*>(row + output_column<T>(c, lane)) = {output[c][2 * h], output[c][2 * h + 1]};
    } else {
      FLASHATTN_UNROLL
      for (int e = 2 * h; e < 2 * h + 2; ++e) {
        *reinterpret_cast<float4*>(row + output_column<T>(c, lane) + e % 2 * kNext<T>) = {
            output[c][e], output[c + 1][e], output[c + 2][e], output[c + 3][e]};
      }
    }
  }
}

// KEYS: of a tile. STAGES: tiles of a ring. Blocks: kv_heads and batch elements for each 16 rows of each chunk.
template <typename T, int D, int DV, int WARPS, int KEYS, int STAGES>
FLASHATTN_KERNEL decode(const cuda::Arguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_SPLIT_ARGUMENTS;
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kRows = kWarpRows, kThreads = WARPS * FLASHATTN_LANES;
  using Queries = SharedTile<T, kRows, D>;
  using Tiles = CopiedTiles<T, KEYS, D, DV, STAGES, FLASHATTN_LANES>;
  extern __shared__ __align__(1024) uchar shared[];

  BlockPosition block = block_position(params, params.num_kv_heads);
  int batch = block.batch, kv_head = block.head, group = params.num_heads / params.num_kv_heads;
  int all_rows = group * params.query_len, row_blocks = (all_rows + kRows - 1) / kRows;
  int chunk = block.part / row_blocks, first_row = block.part % row_blocks * kRows;
  int row_count = minimum(kRows, all_rows - first_row);
  int lane = lane_index(), warp = warp_index();

  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  KeySpan any = seen_in_chunk(visibility, split, chunk);
  KeySpan all = intersection(any, visibility.seen_by_all(0, params.query_len - 1));

  Queries queries = {shared_address(shared)};
  Tiles tiles = {queries.memory + Queries::kBytes + warp * Tiles::kBytes,
                 keys_of(FLASHATTN_STORED_INPUTS(T), params, batch, kv_head),
                 values_of(FLASHATTN_STORED_INPUTS(T), params, batch, kv_head), lane_index()};
  const auto first_key = [&](int tile) { return any.begin + (tile * WARPS + warp) * KEYS; };
  tiles.bring(0, first_key(0), any.end);
  const auto row_at = [&](uint row) {
    RowPosition position = row_position(first_row + row, kv_head, group);
    return position.query < params.query_len ? row_of(query, params, params.query, batch, position.head, position.query)
                                             : nullptr;
  };
  queries.template load_rows<kThreads>(row_at, params.query.column, head_dim, threadIdx.x);
  commit_copies();
  FLASHATTN_UNROLL
  for (int tile = 1; tile < STAGES - 1; ++tile) {
    tiles.bring(tile, first_key(tile), any.end);
    commit_copies();
  }
  WarpRows<T, DV, KEYS> rows;
  rows.begin(visibility, first_row, kv_head, group, lane);
  FLASHATTN_UNROLL
  for (int h = 0; h < 2; ++h) rows.rows[h].seen = intersection(rows.rows[h].seen, any);
  wait_for_copies<STAGES - 2>();
  __syncthreads();  // the queries are there

  for (int tile = 0; first_key(tile) < any.end; ++tile) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();  // the tile is there, and the one before has been read
    tiles.bring(tile + STAGES - 1, first_key(tile + STAGES - 1), any.end);
    commit_copies();
    Fragment scores[KEYS / 8] = {};
    multiply_keys(scores, queries, tiles.keys(tile), lane);
    bool shown = all.contains(first_key(tile), KEYS);
    rows.rescale(rows.to_probabilities(scores, visibility, first_key(tile), shown, lane));
    add_values<2>(rows.output, scores, tiles.values(tile), lane);
  }

  // The warps' results meet in shared memory, where the tiles were.
  wait_for_copies<0>();
  __syncthreads();
  float* results = reinterpret_cast<float*>(shared);  // WARPS x rows x pitch
  OnlineSoftmax* sums = reinterpret_cast<OnlineSoftmax*>(results + WARPS * kRows * kPitch<T, DV>);
  FLASHATTN_UNROLL
  for (int h = 0; h < 2; ++h) {
    int row = lane / 4 + h * kRowStep, place = warp * kRows + row;
    rows.softmax[h].row_sum = lane_sum<kRowLanes>(rows.softmax[h].row_sum);
    if (row < row_count) {
      if (lane % 4 == 0) sums[place] = rows.softmax[h];
      leave_row<T, DV>(results + place * kPitch<T, DV>, rows.output, h, lane);
    }
  }
  __syncthreads();
  bool finite = true;
  for (int at = threadIdx.x; at < row_count * kSlices; at += kThreads) {
    int row = at / kSlices, column = at % kSlices * kSlice;
    MergedSlice merged;
    merged.merge<WARPS>(WARPS, [&](int part, OnlineSoftmax& softmax, Slice& slice) {
      softmax = sums[part * kRows + row];
      slice = *reinterpret_cast<const Slice*>(results + (part * kRows + row) * kPitch<T, DV> + column);
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
          query, FLASHATTN_STORED_INPUTS(T), visibility, batch, kv_head, row_position(first_row + row, kv_head, group),
          any, all, lane);
      if (split.num_chunks == 1) {
        store_row(exact, FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, lane);
      } else {
        store_partials(exact, partials, params, split, batch, chunk, lane);
      }
    }
  }
  if (split.num_chunks == 1) return;
  uint* arrived = arrivals + (batch * params.num_kv_heads + kv_head) * row_blocks + first_row / kRows;
  if (is_last(arrived, split.num_chunks)) {
    merge_chunks<kThreads>(FLASHATTN_ROW_OUTPUTS(T), params, sinks, partials, split, batch, kv_head, first_row,
                           row_count);
  }
}
