// The kernels of metal_decode_split, see decode_split.h.
#include "decode_split.h"

#include "arguments.h"
#include "tile_loader.h"

using namespace flashattn;

#define FLASHATTN_PARTIALS(ACCESS) ACCESS(float, partials), FLASHATTN_VALUE(SplitParams, split)

// Each SIMD group reads one chunk. Grid: (divide_up(chunks, 4), kv_heads, batch) threadgroups of 4 SIMD groups.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL(4)
decode_split(FLASHATTN_INPUT_ARGUMENTS(T, K), FLASHATTN_PARTIALS(FLASHATTN_WRITTEN), FLASHATTN_POSITION,
             uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, ROWS = Sizes::rows;
  decode_split_body<D, DV, ROWS>(query, FLASHATTN_STORED_INPUTS(K), params, FLASHATTN_MASK_INPUTS,
                                 {partials, params, split}, split, int(group.z), int(group.y),
                                 int(group.x * simdgroups + simdgroup), 0, lane);
}

// For key/value heads with many rows: the SIMD groups of a threadgroup share a chunk, and each has other rows. If one
// threadgroup cannot hold all rows, row_blocks threadgroups read the same chunk.
// Grid: (chunks * row_blocks, kv_heads, batch) threadgroups of SIMDGROUPS SIMD groups.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL(Sizes::simdgroups)
decode_split_shared(FLASHATTN_INPUT_ARGUMENTS(T, K), FLASHATTN_PARTIALS(FLASHATTN_WRITTEN), FLASHATTN_POSITION) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, ROWS = Sizes::rows, SIMDGROUPS = Sizes::simdgroups;
  using Rows = DecodeRows<T, D, DV, ROWS>;
  using Element = typename Stored<K>::Element;
  constexpr int kBudget = 15 * 1024 / int(sizeof(Element));  // elements per tile: two tiles take up to 30 of 32 KB
  constexpr int kFitting = kBudget / (Rows::kWidest + 16) / Rows::kKeys * Rows::kKeys;
  constexpr int kTile = kFitting < 32 ? kFitting : 32;
  static_assert(kTile > 0, "not even one batch of keys fits");
  using KeyLoader = TileLoader<Element, kTile, D, SIMDGROUPS * FLASHATTN_LANES>;
  using ValueLoader = TileLoader<Element, kTile, DV, SIMDGROUPS * FLASHATTN_LANES>;
  threadgroup Element key_tile[KeyLoader::kSize];
  threadgroup Element value_tile[ValueLoader::kSize];

  int all_rows = params.query_len * (params.num_heads / params.num_kv_heads);
  int row_blocks = (all_rows + SIMDGROUPS * ROWS - 1) / (SIMDGROUPS * ROWS);
  int chunk = int(group.x) / row_blocks;
  int first_row = (int(group.x) % row_blocks * SIMDGROUPS + int(simdgroup)) * ROWS;
  decode_split_shared_body<Rows, kTile, KeyLoader, ValueLoader>(
      query, FLASHATTN_STORED_INPUTS(K), params, FLASHATTN_MASK_INPUTS, {partials, params, split}, split, key_tile,
      value_tile, int(group.z), int(group.y), chunk, first_row, lane, thread_index);
}

// Grid: (query_len, heads, batch) threadgroups of 32 threads.
template <typename T, typename Sizes>
FLASHATTN_KERNEL(1)
decode_merge(FLASHATTN_OUTPUT_ARGUMENTS(T), FLASHATTN_VALUE(AttentionParams, params),
             FLASHATTN_PARTIALS(FLASHATTN_READ), FLASHATTN_POSITION) {
  constexpr int DV = Sizes::value_dim;
  decode_merge_body<DV>(FLASHATTN_ROW_OUTPUTS(T), params, sinks, {partials, params, split}, split, int(group.z),
                        int(group.y), int(group.x), lane);
}
