// cuda_decode: few queries, many keys. The rows are the queries of all heads that share a key/value head, so that 16 of
// them read a key and a value once. A block has 16 rows and a chunk of the keys. Its warps take tiles of it in turns,
// each with a ring of tiles of its own, so that nothing in the loop waits for another warp.
#include "integer_rows.h"
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

// What a warp of a block does for its rows, and where it gets keys from. K: the type of keys, or uint for quantised words.
template <typename T, typename K, int D, int DV, int ROWS, int WARPS, int KEYS, int STAGES>
struct Work {
  using Queries = SharedTile<T, ROWS, D>;
  using Tiles = CopiedTiles<T, KEYS, D, DV, STAGES, FLASHATTN_LANES>;
  using Rows = WarpRows<T, DV, KEYS>;
  static constexpr int kOwn = 2, kQueryBytes = Queries::kBytes, kPitch = DV + (sizeof(T) == 2 ? 8 : 4);

  Queries queries;
  Rows rows;

  static FLASHATTN_FUNC int first_key(int any) { return any; }
  template <typename F>
  FLASHATTN_FUNC void load(uint memory, F row_at, int64_t step) {
    queries = {memory};
    queries.template load_rows<WARPS * FLASHATTN_LANES>(row_at, step, head_dim, threadIdx.x);
  }
  template <typename F>
  FLASHATTN_FUNC void begin(Visibility visibility, int first_row, int kv_head, int group, F, int64_t, int lane) {
    rows.begin(visibility, first_row, kv_head, group, lane);
  }
  FLASHATTN_FUNC void attend(const Tiles& tiles, int tile, Visibility visibility, int first_key, bool shown, int lane) {
    Fragment scores[KEYS / 8] = {};
    multiply_keys(scores, queries, tiles.keys(tile), lane);
    rows.rescale(rows.to_probabilities(scores, visibility, first_key, shown, lane));
    add_values<2>(rows.output, scores, tiles.values(tile), lane);
  }
  FLASHATTN_FUNC void finish() {
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) rows.softmax[h].row_sum = lane_sum<kRowLanes>(rows.softmax[h].row_sum);
  }
  static FLASHATTN_FUNC int own_row(int h, int lane) { return lane / 4 + h * kRowStep; }
  static FLASHATTN_FUNC bool leads(int lane) { return lane % 4 == 0; }
  FLASHATTN_FUNC void leave_row(float* row, int h, int lane) const { ::leave_row<T, DV>(row, rows.output, h, lane); }
};
template <typename T, int D, int DV, int ROWS, int WARPS, int KEYS, int STAGES>
struct Work<T, uint, D, DV, ROWS, WARPS, KEYS, STAGES> {
  using Tiles = IntegerTiles<D, DV, STAGES, FLASHATTN_LANES>;
  using Rows = IntegerRows<T, D, DV, ROWS / 8>;
  static constexpr int kOwn = Rows::kOwn, kQueryBytes = 0, kPitch = DV + 4;

  Rows rows;

  static FLASHATTN_FUNC int first_key(int any) { return any / KEYS * KEYS; }
  template <typename F>
  FLASHATTN_FUNC void load(uint, F, int64_t) {}
  template <typename F>
  FLASHATTN_FUNC void begin(Visibility visibility, int first_row, int kv_head, int group, F row_at, int64_t step,
                            int lane) {
    rows.begin(visibility, first_row, kv_head, group, row_at, step, lane);
  }
  FLASHATTN_FUNC void attend(const Tiles& tiles, int tile, Visibility visibility, int first_key, bool shown, int lane) {
    rows.attend(tiles.keys(tile), tiles.values(tile), visibility, first_key, shown, lane);
  }
  FLASHATTN_FUNC void finish() { rows.finish(); }
  static FLASHATTN_FUNC int own_row(int h, int lane) { return Rows::own_row(h, lane); }
  static FLASHATTN_FUNC bool leads(int lane) { return lane / 4 == 0; }
  FLASHATTN_FUNC void leave_row(float* row, int h, int lane) const {
    rows.for_columns(h, lane, [&](int column, const float(&x)[kApart]) {
      FLASHATTN_UNROLL
      for (int e = 0; e < kApart; ++e) row[column + e] = x[e];
    });
  }
};

// KEYS: of a tile. STAGES: tiles of a ring. Blocks: kv_heads and batch elements for each ROWS rows of each chunk.
template <typename T, int D, int DV, int ROWS, int WARPS, int KEYS, int STAGES, typename K = T>
FLASHATTN_KERNEL decode(const cuda::Arguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_SPLIT_ARGUMENTS;
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kThreads = WARPS * FLASHATTN_LANES;
  using Warp = Work<T, K, D, DV, ROWS, WARPS, KEYS, STAGES>;
  using Tiles = typename Warp::Tiles;
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

  Tiles tiles = {shared_address(shared) + Warp::kQueryBytes + warp * Tiles::kBytes,
                 keys_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head),
                 values_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head), lane_index()};
  int origin = Warp::first_key(any.begin);
  const auto first_key = [&](int tile) { return origin + (tile * WARPS + warp) * KEYS; };
  tiles.bring(0, first_key(0), any.end);
  const auto row_at = [&](uint row) {
    RowPosition position = row_position(first_row + row, kv_head, group);
    return position.query < params.query_len ? row_of(query, params, params.query, batch, position.head, position.query)
                                             : nullptr;
  };
  Warp own;
  int64_t step = packed_rows ? 1 : params.query.column;
  own.load(shared_address(shared), row_at, step);
  commit_copies();
  FLASHATTN_UNROLL
  for (int tile = 1; tile < STAGES - 1; ++tile) {
    tiles.bring(tile, first_key(tile), any.end);
    commit_copies();
  }
  own.begin(visibility, first_row, kv_head, group, row_at, step, lane);
  FLASHATTN_UNROLL
  for (int h = 0; h < Warp::kOwn; ++h) own.rows.rows[h].seen = intersection(own.rows.rows[h].seen, any);
  wait_for_copies<STAGES - 2>();
  __syncthreads();  // the queries are there

  for (int tile = 0; first_key(tile) < any.end; ++tile) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();  // the tile is there, and the one before has been read
    tiles.bring(tile + STAGES - 1, first_key(tile + STAGES - 1), any.end);
    commit_copies();
    own.attend(tiles, tile, visibility, first_key(tile), all.contains(first_key(tile), KEYS), lane);
  }
  own.finish();

  // The warps' results meet in shared memory, where the tiles were.
  wait_for_copies<0>();
  __syncthreads();
  float* results = reinterpret_cast<float*>(shared);  // WARPS x rows x pitch
  OnlineSoftmax* sums = reinterpret_cast<OnlineSoftmax*>(results + WARPS * ROWS * Warp::kPitch);
  FLASHATTN_UNROLL
  for (int h = 0; h < Warp::kOwn; ++h) {
    int row = Warp::own_row(h, lane), place = warp * ROWS + row;
    if (row < row_count) {
      if (Warp::leads(lane)) sums[place] = own.rows.softmax[h];
      own.leave_row(results + place * Warp::kPitch, h, lane);
    }
  }
  __syncthreads();
  bool finite = true;
  for (int at = threadIdx.x; at < row_count * kSlices; at += kThreads) {
    int row = at / kSlices, column = at % kSlices * kSlice;
    MergedSlice merged;
    merged.merge<WARPS>(WARPS, [&](int part, OnlineSoftmax& softmax, Slice& slice) {
      softmax = sums[part * ROWS + row];
      slice = *reinterpret_cast<const Slice*>(results + (part * ROWS + row) * Warp::kPitch + column);
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
