// metal_decode_split: a few queries, many keys. Phase 1 cuts the keys into chunks, over many threadgroups; each reads
// its keys and values once for all the rows of a key/value head, which are the queries of all its query heads. Phase 2
// merges a row's partial results.
#include "arguments.h"
#include "decode_rows.h"
#include "epilogue.h"
#include "tile_loader.h"

namespace flashattn {

#define FLASHATTN_PARTIALS(SPACE)                                                   \
  SPACE float *partial_out [[buffer(13)]], SPACE float *partial_max [[buffer(14)]], \
      SPACE float *partial_sum [[buffer(15)]], const constant SplitParams &split [[buffer(16)]]

// Where a row's partial result of one chunk lies: a row's chunks side by side.
METAL_FUNC int64_t partial_index(const constant AttentionParams& params, const constant SplitParams& split, int batch,
                                 int head, int query, int chunk) {
  int64_t row = (int64_t(batch) * params.num_heads + head) * params.query_len + query;
  return row * split.num_chunks + chunk;
}

template <typename Rows>
METAL_FUNC void store_partials(thread Rows& rows, device float* partial_out, device float* partial_max,
                               device float* partial_sum, const constant AttentionParams& params,
                               const constant SplitParams& split, int batch, int chunk, uint lane) {
  RowPosition position = rows.first;
  FLASHATTN_UNROLL
  for (int r = 0; r < Rows::kRows; ++r) {
    if (position.query < params.query_len) {  // otherwise it is padding
      int64_t index = partial_index(params, split, batch, position.head, position.query, chunk);
      rows.store(r, partial_out + index * value_dim, 1.0f, lane);
      if (lane == 0) {
        partial_max[index] = rows.softmax[r].row_max;
        partial_sum[index] = rows.softmax[r].row_sum;
      }
    }
    position.next();
  }
}

}  // namespace flashattn

using namespace flashattn;

// Phase 1 where the rows of a key/value head fit one SIMD group: each SIMD group takes a chunk of its own.
// Grid: (chunks / SIMD groups, kv_heads, batch).
template <typename T, int D, int DV, int ROWS, typename K = T>
[[kernel, max_total_threads_per_threadgroup(128)]] void decode_split(
    FLASHATTN_TENSORS(T, K), FLASHATTN_QUANTISED_INPUTS, FLASHATTN_PARAMS, FLASHATTN_OPTIONAL_INPUTS,
    FLASHATTN_PARTIALS(device), uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Rows = DecodeRows<T, D, DV, ROWS>;
  int batch = int(group.z), kv_head = int(group.y), chunk = int(group.x * simdgroups + simdgroup);
  if (chunk >= split.num_chunks) {
    return;
  }
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  thread Rows rows;
  rows.load(query, row_position(0, kv_head, params.num_heads / params.num_kv_heads), visibility, batch, lane);

  auto keys = FLASHATTN_KEYS(batch, kv_head);
  auto values = FLASHATTN_VALUES(batch, kv_head);
  int chunk_begin = split.first_key + chunk * split.chunk_len;
  int last = params.query_len - 1;
  KeySpan any = intersection(visibility.seen_by_any(0, last), KeySpan{chunk_begin, chunk_begin + split.chunk_len});
  KeySpan all = visibility.seen_by_all(0, last);
  rows.attend(keys, values, visibility, all, any.begin, any.end, Rows::kKeys, 0, lane);
  store_partials(rows, partial_out, partial_max, partial_sum, params, split, batch, chunk, lane);
}

// Phase 1 for more rows: a threadgroup takes a chunk, its SIMD groups take ROWS rows each, and keys and values go
// through threadgroup memory, so that they are still read once. More rows than a threadgroup holds are further
// threadgroups. Grid: (chunks * blocks of rows, kv_heads, batch).
template <typename T, int D, int DV, int ROWS, int SIMDGROUPS, typename K = T>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS* FLASHATTN_LANES)]] void decode_split_shared(
    FLASHATTN_TENSORS(T, K), FLASHATTN_QUANTISED_INPUTS, FLASHATTN_PARAMS, FLASHATTN_OPTIONAL_INPUTS,
    FLASHATTN_PARTIALS(device), uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint thread_index [[thread_index_in_threadgroup]]) {
  using Rows = DecodeRows<T, D, DV, ROWS>;
  using Element = typename Stored<K>::Element;
  constexpr int kBudget = 15 * 1024 / int(sizeof(Element));  // elements of each of the two tiles: 30 of 32 KB
  constexpr int kFitting = kBudget / (Rows::kWidest + 16) / Rows::kKeys * Rows::kKeys;
  constexpr int kTile = kFitting < 32 ? kFitting : 32;
  static_assert(kTile > 0, "not even one batch of keys fits");
  using KeyLoader = TileLoader<Element, kTile, D, SIMDGROUPS * FLASHATTN_LANES>;
  using ValueLoader = TileLoader<Element, kTile, DV, SIMDGROUPS * FLASHATTN_LANES>;
  using Tile = PlainRows<const threadgroup Element*>;
  threadgroup Element key_tile[KeyLoader::kSize];
  threadgroup Element value_tile[ValueLoader::kSize];

  int heads = params.num_heads / params.num_kv_heads, all_rows = params.query_len * heads;
  int row_blocks = (all_rows + SIMDGROUPS * ROWS - 1) / (SIMDGROUPS * ROWS);
  int batch = int(group.z), kv_head = int(group.y), chunk = int(group.x) / row_blocks;
  int first_row = (int(group.x) % row_blocks * SIMDGROUPS + int(simdgroup)) * ROWS;
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  thread Rows rows;
  rows.load(query, row_position(first_row, kv_head, heads), visibility, batch, lane);

  auto keys = FLASHATTN_KEYS(batch, kv_head);
  auto values = FLASHATTN_VALUES(batch, kv_head);
  int chunk_begin = split.first_key + chunk * split.chunk_len;
  int last = params.query_len - 1;
  KeySpan any = intersection(visibility.seen_by_any(0, last), KeySpan{chunk_begin, chunk_begin + split.chunk_len});
  KeySpan all = visibility.seen_by_all(0, last);
  for (int tile = any.begin; tile < any.end; tile += kTile) {
    int tile_end = metal::min(tile + kTile, any.end);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the previous tile has been read
    KeyLoader::load(key_tile, keys.from(tile), tile_end - tile, head_dim, thread_index);
    ValueLoader::load(value_tile, values.from(tile), tile_end - tile, value_dim, thread_index);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    rows.attend(Tile{key_tile, RowLayout{KeyLoader::kStride, 1}}, Tile{value_tile, RowLayout{ValueLoader::kStride, 1}},
                visibility, all, tile, tile_end, Rows::kKeys, tile, lane);
  }
  store_partials(rows, partial_out, partial_max, partial_sum, params, split, batch, chunk, lane);
}

// Phase 2: one SIMD group merges one row. Grid: (query_len, heads, batch) threadgroups of 32 threads.
template <typename T, int DV>
[[kernel, max_total_threads_per_threadgroup(32)]] void decode_merge(FLASHATTN_OUTPUTS(T), FLASHATTN_PARAMS,
                                                                    FLASHATTN_SINKS, FLASHATTN_PARTIALS(const device),
                                                                    uint3 group [[threadgroup_position_in_grid]],
                                                                    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int kColumns = DV / FLASHATTN_LANES;
  int batch = int(group.z), head = int(group.y), query = int(group.x);
  int64_t first = partial_index(params, split, batch, head, query, 0);

  float chunk_max = -INFINITY;
  for (int chunk = int(lane); chunk < split.num_chunks; chunk += FLASHATTN_LANES) {
    chunk_max = metal::max(chunk_max, partial_max[first + chunk]);
  }
  OnlineSoftmax whole = empty_row();
  whole.raise(metal::simd_max(chunk_max));

  float output[kColumns];
  FLASHATTN_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    output[i] = 0;
  }
  // A lane weighs the chunk of its number, then all lanes add up 32 chunks' outputs.
  for (int chunks = 0; chunks < split.num_chunks; chunks += FLASHATTN_LANES) {
    int count = metal::min(FLASHATTN_LANES, split.num_chunks - chunks);
    float weight = 0, sum = 0;
    if (int(lane) < count) {
      weight = whole.probability(partial_max[first + chunks + int(lane)]);
      sum = weight * partial_sum[first + chunks + int(lane)];
    }
    whole.row_sum += metal::simd_sum(sum);
    for (int c = 0; c < count; ++c) {
      float chunk_weight = metal::simd_shuffle(weight, ushort(c));
      const device float* partial = partial_out + (first + chunks + c) * value_dim;
      FLASHATTN_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        int column = int(lane) * kColumns + i;
        if (DV == value_dim || column < value_dim) {
          output[i] = metal::fma(chunk_weight, partial[column], output[i]);
        }
      }
    }
  }
  RowResult result = finish_row(whole, sinks, params, batch, head);
  device T* row = out_row(out, params, batch, head, query);
  FLASHATTN_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    int column = int(lane) * kColumns + i;
    if (DV == value_dim || column < value_dim) {
      row[column] = T(output[i] * result.normalise);
    }
  }
  if (lane == 0) {
    *lse_of(lse, params, batch, head, query) = result.lse;
  }
}
