// metal_prefill_reg is for many queries. A threadgroup works on one head, and each SIMD group on 8 rows. The output,
// scores and probabilities of these rows stay in registers, as 8x8 fragments. A tile's keys, and then the tile's
// values, use the same threadgroup memory.
#include "arguments.h"
#include "epilogue.h"
#include "fragment_loader.h"
#include "mma.h"
#include "tile_loader.h"
#include "tile_product.h"
#include "visibility.h"

namespace flashattn {

// Turns a lane's products of query and key into probabilities. scores: the lane's FRAGMENTS fragments of one row.
// first_key: the key of the first product. Returns the factor by which the caller must multiply the row's output so
// far. The new row_sum covers only the keys of this lane.
template <int FRAGMENTS>
METAL_FUNC float to_probabilities(thread Fragment* scores, thread OnlineSoftmax& softmax, Visibility visibility,
                                  Row row, int first_key, bool unmasked) {
  float score_max = -INFINITY;
  FLASHATTN_UNROLL
  for (int k = 0; k < FRAGMENTS; ++k) {
    FLASHATTN_UNROLL
    for (int e = 0; e < 2; ++e) {
      int key = first_key + k * 8 + e;
      float score = visibility.score(scores[k][e], row, key);
      scores[k][e] = unmasked ? score : visibility.masked(score, row, key);
      score_max = metal::max(score_max, scores[k][e]);
    }
  }
  float rescale = softmax.raise(across_row_max(score_max));
  float sum = 0;
  FLASHATTN_UNROLL
  for (int k = 0; k < FRAGMENTS; ++k) {
    FLASHATTN_UNROLL
    for (int e = 0; e < 2; ++e) {
      scores[k][e] = softmax.probability(scores[k][e]);
      sum += scores[k][e];
    }
  }
  softmax.row_sum += sum;
  return rescale;
}

}  // namespace flashattn

using namespace flashattn;

// D and DV: head_dim and value_dim, rounded up to a multiple of 8. KEYS: keys per tile.
// Grid: (divide_up(query_len, kRows), heads, batch) threadgroups of SIMDGROUPS SIMD groups.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL(Sizes::simdgroups)
prefill_reg(FLASHATTN_INPUT_ARGUMENTS(T, K), FLASHATTN_OUTPUT_ARGUMENTS(T), FLASHATTN_POSITION) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, SIMDGROUPS = Sizes::simdgroups, KEYS = Sizes::keys;
  constexpr int kRows = SIMDGROUPS * 8;
  constexpr int kColumns = DV / 8, kKeyFragments = KEYS / 8;
  using Element = typename Stored<K>::Element;
  using KeyLoader = TileLoader<Element, KEYS, D, SIMDGROUPS * FLASHATTN_LANES>;
  using ValueLoader = TileLoader<Element, KEYS, DV, SIMDGROUPS * FLASHATTN_LANES>;
  threadgroup Element tile[KeyLoader::kSize > ValueLoader::kSize ? KeyLoader::kSize : ValueLoader::kSize];
  threadgroup int finite_values[SIMDGROUPS];  // for each SIMD group: whether all values that it loaded are finite

  // The first threadgroups get the last queries, because these see the most keys under a causal mask. The longest work
  // should start first.
  int first_query = int(grid.x - 1 - group.x) * kRows;
  int last_query = metal::min(first_query + kRows, params.query_len) - 1;
  int batch = int(group.z), head = int(group.y);
  int kv_head = head / (params.num_heads / params.num_kv_heads);
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);

  int fragment_r = fragment_row(lane), fragment_c = fragment_column(lane);
  int own_query = first_query + int(simdgroup) * 8;  // the first of this SIMD group's eight queries
  Row row = visibility.row(own_query + fragment_r, head);
  OnlineSoftmax softmax = empty_row();
  Fragment output[kColumns] = {};

  // Queries stay in registers, in query's dtype, if the output leaves room for them.
  constexpr bool kKeepQueries = 4 * DV + int(sizeof(T)) * D <= 1024;
  LaneRow<T, D, kKeepQueries> own_queries(head_of(query, params, params.query, batch, head), row_layout(params.query),
                                          row.query, params.query_len, fragment_c, head_dim);

  auto keys = keys_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head);
  auto values = values_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head);
  KeySpan any = visibility.seen_by_any(first_query, last_query);
  KeySpan all = visibility.unmasked(first_query, last_query);
  KeySpan own = visibility.seen_by_any(own_query, metal::min(own_query + 7, last_query));

  for (int first = any.begin / KEYS * KEYS; first < any.end; first += KEYS) {
    int key_count = whole_keys ? KEYS : metal::min(KEYS, params.key_len - first);
    int blocks = visibility.blocks(head, 1, first_query, kRows, first, KEYS);
    if (!(blocks & kBlockShows)) {
      continue;
    }
    bool unmasked = all.contains(first, KEYS) && !(blocks & kBlockChanges);
    bool needed = own.meets(first, KEYS);  // whether a query of this SIMD group sees a key of the tile

    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the previous values have been read
    KeyLoader::load(tile, keys.from(first), key_count, head_dim, thread_index);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    Fragment scores[kKeyFragments];
    if (needed) {
      multiply_transposed<kKeyFragments, KeyLoader::kStride>(scores, own_queries, tile, lane);
    }

    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the keys have been read
    bool finite = ValueLoader::load(tile, values.from(first), key_count, value_dim, thread_index);
    if (!unmasked) {
      set_flag(finite_values, finite, lane, simdgroup);
    }
    if (needed) {
      float rescale = to_probabilities<kKeyFragments>(scores, softmax, visibility, row, first + fragment_c, unmasked);
      FLASHATTN_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        output[c] *= rescale;
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the values are there

    if (!unmasked) {
      bool finite_tile = all_true<SIMDGROUPS>(finite_values);
      if (!finite_tile) {
        if (needed) {
          add_not_finite<KEYS, kColumns>(output, scores, tile, ValueLoader::kStride, lane);
        }
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the values have been read
        ValueLoader::clean(tile, thread_index);
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the values are clean
      }
    }
    FLASHATTN_UNROLL
    for (int k = 0; k < kKeyFragments; ++k) {
      if (own.meets(first + k * 8, 8)) {  // otherwise the probabilities of these keys are 0
        add_product<kColumns, ValueLoader::kStride>(output, scores[k], tile + k * 8 * ValueLoader::kStride, lane);
      }
    }
  }

  softmax.row_sum = across_row_sum(softmax.row_sum);
  if (!whole_rows && row.query >= params.query_len) {
    return;
  }
  RowResult result = finish_row(softmax, sinks, params, batch, head);
  RowOutputs<T> outputs = FLASHATTN_ROW_OUTPUTS(T);
  device T* target = outputs.out_row(params, batch, head, row.query);
  store_row<DV>(target, output, result.normalise, fragment_c, value_dim);
  if (has_exact_out) {
    store_row<DV>(outputs.exact_row(params, batch, head, row.query), output, result.normalise, fragment_c, value_dim);
  }
  if (fragment_c == 0) {
    outputs.store_result(params, batch, head, row.query, result);
  }
}
