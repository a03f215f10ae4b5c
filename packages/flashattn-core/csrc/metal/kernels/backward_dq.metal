// metal_backward_dq computes the gradient of the queries. As in metal_prefill_reg, each SIMD group has 8 rows of one
// head and loops over tiles of keys. A tile's values and then its keys use the same threadgroup memory. Keys come
// second, because the last product needs them, too.
#include "arguments.h"
#include "score_gradient.h"
#include "tile_loader.h"
#include "tile_product.h"

using namespace flashattn;

// D and DV: head_dim and value_dim, rounded up to whole fragments. KEYS: keys per tile.
// Grid: (divide_up(query_len, kRows), heads, batch) threadgroups of SIMDGROUPS SIMD groups.
template <typename T, typename Sizes>
FLASHATTN_KERNEL(Sizes::simdgroups)
backward_dq(FLASHATTN_INPUT_ARGUMENTS(T, T), FLASHATTN_BACKWARD_ARGUMENTS(T), FLASHATTN_WRITTEN(T, dq),
            FLASHATTN_POSITION) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, SIMDGROUPS = Sizes::simdgroups, KEYS = Sizes::keys;
  constexpr int kRows = SIMDGROUPS * 8, kKeyFragments = KEYS / 8, kDepth = D / 8;
  using KeyLoader = TileLoader<T, KEYS, D, SIMDGROUPS * FLASHATTN_LANES>;
  using ValueLoader = TileLoader<T, KEYS, DV, SIMDGROUPS * FLASHATTN_LANES>;
  threadgroup T tile[KeyLoader::kSize > ValueLoader::kSize ? KeyLoader::kSize : ValueLoader::kSize];
  threadgroup int finite_keys[SIMDGROUPS];  // for each SIMD group: whether all keys that it loaded are finite

  // The first threadgroups get the last queries, because these see the most keys under a causal mask. The longest work
  // should start first.
  int first_query = int(grid.x - 1 - group.x) * kRows;
  int last_query = metal::min(first_query + kRows, params.query_len) - 1;
  int batch = int(group.z), head = int(group.y);
  int kv_head = head / (params.num_heads / params.num_kv_heads);
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);

  int fragment_r = fragment_row(lane), fragment_c = fragment_column(lane);
  int own_query = first_query + int(simdgroup) * 8;  // the SIMD group's first query
  Row row = visibility.row(own_query + fragment_r, head);
  SavedRow saved = saved_row(head_of(row_stats, params, params.row_stats, batch, head),
                             delta + delta_offset(params, batch, head), params, row.query);
  Fragment sums[kDepth] = {};

  // Rows of query stay in registers if they take at most 64 registers together with the sums. Rows of dout stay in
  // registers, too, if they still fit into the 64.
  constexpr int kQueryRegisters = D * int(sizeof(T)) / 16, kDoutRegisters = DV * int(sizeof(T)) / 16;
  constexpr bool kKeepQueries = D / 4 + kQueryRegisters <= 64;
  constexpr bool kKeepDout = D / 4 + kQueryRegisters + kDoutRegisters <= 64;
  LaneRow<T, D, kKeepQueries> own_queries(head_of(query, params, params.query, batch, head), row_layout(params.query),
                                          row.query, params.query_len, fragment_c, head_dim);
  LaneRow<T, DV, kKeepDout> own_dout(head_of(dout, params, backward.dout, batch, head), row_layout(backward.dout),
                                     row.query, params.query_len, fragment_c, value_dim);

  auto keys = rows_of(key, params, params.key, batch, kv_head);
  auto values = rows_of(value, params, params.value, batch, kv_head);
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
    bool needed = own.meets(first, KEYS);  // whether one of the SIMD group's queries sees a key of the tile

    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the previous keys have been read
    ValueLoader::load(tile, values.from(first), key_count, value_dim, thread_index);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the values are there
    Fragment gradients[kKeyFragments];                       // first gradients of probabilities, later of scores
    if (needed) {
      multiply_transposed<kKeyFragments, ValueLoader::kStride>(gradients, own_dout, tile, lane);
    }

    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the values have been read
    bool finite = KeyLoader::load(tile, keys.from(first), key_count, head_dim, thread_index);
    if (!unmasked) {
      set_flag(finite_keys, finite, lane, simdgroup);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the keys are there
    if (needed) {
      Fragment scores[kKeyFragments];
      multiply_transposed<kKeyFragments, KeyLoader::kStride>(scores, own_queries, tile, lane);
      FLASHATTN_UNROLL
      for (int k = 0; k < kKeyFragments; ++k) {
        FLASHATTN_UNROLL
        for (int e = 0; e < 2; ++e) {
          gradients[k][e] = score_gradient(scores[k][e], gradients[k][e], visibility, row, saved,
                                           first + k * 8 + fragment_c + e, unmasked)
                                .gradient;
        }
      }
    }

    if (!unmasked) {
      bool finite_tile = all_true<SIMDGROUPS>(finite_keys);
      if (!finite_tile) {
        if (needed) {
          add_not_finite<KEYS, kDepth>(sums, gradients, tile, KeyLoader::kStride, lane);
        }
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the keys have been read
        KeyLoader::clean(tile, thread_index);
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the keys are clean
      }
    }
    FLASHATTN_UNROLL
    for (int k = 0; k < kKeyFragments; ++k) {
      if (own.meets(first + k * 8, 8)) {  // otherwise all gradients[k] are 0
        add_product<kDepth, KeyLoader::kStride>(sums, gradients[k], tile + k * 8 * KeyLoader::kStride, lane);
      }
    }
  }

  if (!whole_rows && row.query >= params.query_len) {
    return;
  }
  device T* target = row_of(dq, params, backward.dq, batch, head, row.query);
  store_row<D>(target, sums, params.scale, fragment_c, head_dim);
}
