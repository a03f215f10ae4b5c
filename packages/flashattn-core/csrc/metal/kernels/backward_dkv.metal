// metal_backward_dkv computes the gradients of keys and values. Each SIMD group has 8 keys of one key/value head, and
// loops over the queries of all query heads that share this head. So one SIMD group sums over these heads, always in
// the same order, and no two threadgroups write the same element. The rows of the scores are keys, and the columns are
// queries. Registers then hold probabilities and score gradients as left operands of the products for dk and dv.
#include "arguments.h"
#include "score_gradient.h"
#include "tile_loader.h"
#include "tile_product.h"

using namespace flashattn;

// D and DV: head_dim and value_dim, rounded up to whole fragments. ROWS: queries per tile. PARTS: 1, or 2 if the sums
// of dk and dv together would need too many registers. With 2, threadgroups for dk and for dv alternate in the grid.
// Grid: (divide_up(key_len, kKeys) * PARTS, kv_heads, batch) threadgroups of SIMDGROUPS SIMD groups.
template <typename T, typename Sizes>
FLASHATTN_KERNEL(Sizes::simdgroups)
backward_dkv(FLASHATTN_INPUT_ARGUMENTS(T, T), FLASHATTN_BACKWARD_ARGUMENTS(T), FLASHATTN_WRITTEN(T, dk),
             FLASHATTN_WRITTEN(T, dv), FLASHATTN_POSITION) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, SIMDGROUPS = Sizes::simdgroups, ROWS = Sizes::rows,
                PARTS = Sizes::parts;
  constexpr int kKeys = SIMDGROUPS * 8, kRowFragments = ROWS / 8, kDepth = D / 8, kColumns = DV / 8;
  using QueryLoader = TileLoader<T, ROWS, D, SIMDGROUPS * FLASHATTN_LANES>;
  using DoutLoader = TileLoader<T, ROWS, DV, SIMDGROUPS * FLASHATTN_LANES>;
  threadgroup T query_tile[QueryLoader::kSize];
  threadgroup T dout_tile[DoutLoader::kSize];
  threadgroup SavedRow saved_rows[ROWS];
  threadgroup int finite_rows[SIMDGROUPS];  // for each SIMD group: whether all elements that it loaded are finite

  // The first threadgroups get the first keys, because most queries see these under a causal mask. The longest work
  // should start first.
  int first_key = int(group.x) / PARTS * kKeys;
  int last_key = metal::min(first_key + kKeys, params.key_len) - 1;
  bool with_dk = PARTS == 1 || group.x % 2 == 0, with_dv = PARTS == 1 || group.x % 2 == 1;
  int batch = int(group.z), kv_head = int(group.y);
  int heads = params.num_heads / params.num_kv_heads;
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);

  int fragment_r = fragment_row(lane), fragment_c = fragment_column(lane);
  int own_first = first_key + int(simdgroup) * 8;  // the SIMD group's first key
  int own_key = own_first + fragment_r;
  constexpr int kSums = PARTS == 1 ? kDepth + kColumns : kDepth > kColumns ? kDepth : kColumns;
  Fragment sums[kSums] = {};
  thread Fragment* dk_sums = sums;
  thread Fragment* dv_sums = sums + (PARTS == 1 ? kDepth : 0);

  // Keys stay in registers if they take at most 96 registers together with sums, scores and gradients. Values stay in
  // registers, too, if they still fit into the 96.
  constexpr int kBusy = 2 * kSums + ROWS / 2;
  constexpr int kKeyRegisters = D * int(sizeof(T)) / 16, kValueRegisters = DV * int(sizeof(T)) / 16;
  constexpr bool kKeepKeys = kBusy + kKeyRegisters <= 96;
  constexpr bool kKeepValues = kBusy + kKeyRegisters + kValueRegisters <= 96;
  LaneRow<T, D, kKeepKeys> own_keys(head_of(key, params, params.key, batch, kv_head), row_layout(params.key), own_key,
                                    params.key_len, fragment_c, head_dim);
  LaneRow<T, DV, kKeepValues> own_values(head_of(value, params, params.value, batch, kv_head), row_layout(params.value),
                                         own_key, params.key_len, fragment_c, value_dim);

  KeySpan queries_of_any = visibility.seen_from(first_key, last_key);
  for (int head = kv_head * heads; head < (kv_head + 1) * heads; ++head) {
    auto queries = rows_of(query, params, params.query, batch, head);
    auto douts = rows_of(dout, params, backward.dout, batch, head);
    const device float* stats = head_of(row_stats, params, params.row_stats, batch, head);
    const device float* deltas = delta + delta_offset(params, batch, head);
    float slope = visibility.row(0, head).slope;

    for (int first = queries_of_any.begin / ROWS * ROWS; first < queries_of_any.end; first += ROWS) {
      int last = metal::min(first + ROWS, params.query_len) - 1;
      int row_count = whole_rows ? ROWS : last - first + 1;
      int blocks = visibility.blocks(head, 1, first, ROWS, first_key, kKeys);
      if (!(blocks & kBlockShows)) {
        continue;
      }
      bool unmasked =
          row_count == ROWS && visibility.unmasked(first, last).contains(first_key, kKeys) && !(blocks & kBlockChanges);
      bool needed = visibility.seen_by_any(first, last).meets(own_first, 8);  // a query sees a key of the SIMD group

      threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the previous rows have been read
      bool finite_queries = QueryLoader::load(query_tile, queries.from(first), row_count, head_dim, thread_index);
      bool finite_dout = DoutLoader::load(dout_tile, douts.from(first), row_count, value_dim, thread_index);
      if (thread_index < ROWS) {
        saved_rows[thread_index] = saved_row(stats, deltas, params, first + int(thread_index));
      }
      if (!unmasked) {
        set_flag(finite_rows, finite_queries && finite_dout, lane, simdgroup);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the rows are there

      Fragment probabilities[kRowFragments];  // first products of keys and queries, later probabilities
      Fragment gradients[kRowFragments];      // first gradients of probabilities, later of scores
      if (needed) {
        multiply_transposed<kRowFragments, QueryLoader::kStride>(probabilities, own_keys, query_tile, lane);
        if (with_dk) {
          multiply_transposed<kRowFragments, DoutLoader::kStride>(gradients, own_values, dout_tile, lane);
        }
        FLASHATTN_UNROLL
        for (int k = 0; k < kRowFragments; ++k) {
          FLASHATTN_UNROLL
          for (int e = 0; e < 2; ++e) {
            int r = k * 8 + fragment_c + e;
            ScoreGradient result =
                score_gradient(probabilities[k][e], with_dk ? gradients[k][e] : 0.0f, visibility,
                               visibility.row_with_slope(first + r, head, slope), saved_rows[r], own_key, unmasked);
            probabilities[k][e] = result.probability;
            gradients[k][e] = result.gradient;
          }
        }
      }

      if (!unmasked) {
        bool finite_tile = all_true<SIMDGROUPS>(finite_rows);
        if (!finite_tile) {
          if (needed && with_dk) {
            add_not_finite<ROWS, kDepth>(dk_sums, gradients, query_tile, QueryLoader::kStride, lane);
          }
          if (needed && with_dv) {
            add_not_finite<ROWS, kColumns>(dv_sums, probabilities, dout_tile, DoutLoader::kStride, lane);
          }
          threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the rows have been read
          QueryLoader::clean(query_tile, thread_index);
          DoutLoader::clean(dout_tile, thread_index);
          threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the rows are clean
        }
      }
      FLASHATTN_UNROLL
      for (int k = 0; k < kRowFragments; ++k) {
        int eighth = first + k * 8;  // first of 8 queries; all 8 are skipped if none sees one of the SIMD group's keys
        if (visibility.seen_by_any(eighth, metal::min(eighth + 7, last)).meets(own_first, 8)) {
          if (with_dv) {
            add_product<kColumns, DoutLoader::kStride, true>(dv_sums, probabilities[k],
                                                             dout_tile + k * 8 * DoutLoader::kStride, lane);
          }
          if (with_dk) {
            add_product<kDepth, QueryLoader::kStride, true>(dk_sums, gradients[k],
                                                            query_tile + k * 8 * QueryLoader::kStride, lane);
          }
        }
      }
    }
  }

  if (!whole_keys && own_key >= params.key_len) {
    return;
  }
  if (with_dk) {
    store_row<D>(row_of(dk, params, backward.dk, batch, kv_head, own_key), dk_sums, params.scale, fragment_c, head_dim);
  }
  if (with_dv) {
    store_row<DV>(row_of(dv, params, backward.dv, batch, kv_head, own_key), dv_sums, 1.0f, fragment_c, value_dim);
  }
}
