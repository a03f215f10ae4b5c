// metal_prefill_tg is for short prompts, and for few queries with many query heads per key/value head. Four SIMD groups
// work on the same 8 or 16 rows. Each SIMD group computes the scores of a quarter of the keys, then a quarter of the
// output's columns. So a threadgroup reads each key and value from device memory only once, unless a value is NaN or
// infinite. Scores and probabilities pass through threadgroup memory.
#include "arguments.h"
#include "epilogue.h"
#include "finite.h"
#include "fragment_loader.h"
#include "mma.h"
#include "tile_product.h"
#include "visibility.h"

using namespace flashattn;

// A key/value head with G query heads has G rows per query: row r is query r / G of its query head r % G.
// D and DV: head_dim and value_dim, rounded up to a multiple of 8.
// Grid: (divide_up(rows, kRows), kv_heads, batch) threadgroups of 128 threads.
template <typename T, typename Sizes>
FLASHATTN_KERNEL(4)
prefill_tg(FLASHATTN_INPUT_ARGUMENTS(T, T), FLASHATTN_OUTPUT_ARGUMENTS(T), FLASHATTN_POSITION) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, ROW_FRAGMENTS = Sizes::row_fragments;
  constexpr int kSimdgroups = 4, kKeys = 8 * kSimdgroups;  // each SIMD group has eight keys
  constexpr int kRows = ROW_FRAGMENTS * 8, kRowsEach = kRows / kSimdgroups;
  constexpr int kDepth = D / 8, kColumns = (DV / 8 + kSimdgroups - 1) / kSimdgroups;
  constexpr int kStride = kKeys + 4;  // the padding puts a fragment's eight rows into different banks
  // There are two buffers, because the next tile's scores are written while this tile's probabilities are being read.
  threadgroup float scores[2][kRows * kStride];
  threadgroup float rescales[2][kRows];
  threadgroup float normalise[kRows];

  int batch = int(group.z), kv_head = int(group.y);
  int heads = params.num_heads / params.num_kv_heads, row_count = params.query_len * heads;
  int first_row = int(grid.x - 1 - group.x) * kRows;  // the last queries first: under a causal mask they see most keys
  int last_row = metal::min(first_row + kRows, row_count) - 1;
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);

  int fragment_r = fragment_row(lane), fragment_c = fragment_column(lane);
  Row rows[ROW_FRAGMENTS];
  using Queries = LaneRow<T, D, ROW_FRAGMENTS * D <= 128>;
  Queries queries[ROW_FRAGMENTS];
  Fragment output[ROW_FRAGMENTS][kColumns] = {};
  FLASHATTN_UNROLL
  for (int i = 0; i < ROW_FRAGMENTS; ++i) {
    int r = first_row + i * 8 + fragment_r;
    rows[i] = visibility.row(r / heads, kv_head * heads + r % heads);
    queries[i] = Queries(head_of(query, params, params.query, batch, rows[i].head), row_layout(params.query),
                         rows[i].query, params.query_len, fragment_c, head_dim);
  }
  OnlineSoftmax softmax[kRowsEach];  // of the rows whose maximum and sum this SIMD group computes
  FLASHATTN_UNROLL
  for (int r = 0; r < kRowsEach; ++r) {
    softmax[r] = empty_row();
  }

  const device T* keys = head_of(key, params, params.key, batch, kv_head);
  const device T* values = head_of(value, params, params.value, batch, kv_head);
  RowLayout key_layout = row_layout(params.key), value_layout = row_layout(params.value);
  KeySpan any = visibility.seen_by_any(first_row / heads, last_row / heads);
  KeySpan all = visibility.unmasked(first_row / heads, last_row / heads);
  int turn = 1;
  for (int first = any.begin; first < any.end; first += kKeys) {
    int blocks = visibility.blocks(kv_head * heads, heads, first_row / heads, last_row / heads - first_row / heads + 1,
                                   first, kKeys);
    if (!(blocks & kBlockShows)) {
      continue;
    }
    turn = 1 - turn;
    bool unmasked = all.contains(first, kKeys) && !(blocks & kBlockChanges);

    // Multiplies all rows by this SIMD group's eight keys.
    int own_first = first + int(simdgroup) * 8;
    Fragment product[ROW_FRAGMENTS] = {};
    if (own_first < any.end) {
      FLASHATTN_UNROLL
      for (int d = 0; d < kDepth; ++d) {
        Fragment transposed = to_fragment(
            load_pair_transposed<D>(keys, key_layout, own_first + fragment_c, d * 8 + fragment_r, any.end, head_dim));
        FLASHATTN_UNROLL
        for (int i = 0; i < ROW_FRAGMENTS; ++i) {
          product[i] = multiply(queries[i].fragment(d), transposed, product[i]);
        }
      }
    }
    FLASHATTN_UNROLL
    for (int i = 0; i < ROW_FRAGMENTS; ++i) {
      FLASHATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        int key_index = own_first + fragment_c + e;
        float score = visibility.score(product[i][e], rows[i], key_index);
        scores[turn][(i * 8 + fragment_r) * kStride + int(simdgroup) * 8 + fragment_c + e] =
            unmasked ? score : visibility.masked(score, rows[i], key_index);
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    // Computes the softmax of this SIMD group's rows. Each lane has one key.
    FLASHATTN_UNROLL
    for (int r = 0; r < kRowsEach; ++r) {
      int row = int(simdgroup) * kRowsEach + r;
      threadgroup float* own_score = scores[turn] + row * kStride + int(lane);
      float score = *own_score;
      float rescale = softmax[r].raise(metal::simd_max(score));
      float probability = softmax[r].probability(score);
      softmax[r].row_sum += metal::simd_sum(probability);
      *own_score = probability;
      if (lane == 0) {
        rescales[turn][row] = rescale;
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    // output += probabilities @ values, for all rows and this SIMD group's columns.
    FLASHATTN_UNROLL
    for (int i = 0; i < ROW_FRAGMENTS; ++i) {
      float rescale = rescales[turn][i * 8 + fragment_r];
      FLASHATTN_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        output[i][c] *= rescale;
      }
    }
    bool finite = true;
    FLASHATTN_UNROLL
    for (int k = 0; k < kKeys / 8; ++k) {
      if (first + k * 8 < any.end) {
        Fragment probability[ROW_FRAGMENTS];
        FLASHATTN_UNROLL
        for (int i = 0; i < ROW_FRAGMENTS; ++i) {
          const threadgroup float* pair = scores[turn] + (i * 8 + fragment_r) * kStride + k * 8 + fragment_c;
          probability[i] = Fragment{pair[0], pair[1]};
        }
        FLASHATTN_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          int column = (c * kSimdgroups + int(simdgroup)) * 8;
          if (column < DV) {
            Fragment v = to_fragment(load_pair<DV>(values, value_layout, first + k * 8 + fragment_r,
                                                   column + fragment_c, any.end, value_dim));
            if (!unmasked) {
              finite = finite && is_finite(v.x) && is_finite(v.y);
              v = Fragment{finite_or_zero(v.x), finite_or_zero(v.y)};
            }
            FLASHATTN_UNROLL
            for (int i = 0; i < ROW_FRAGMENTS; ++i) {
              output[i][c] = multiply(probability[i], v, output[i][c]);
            }
          }
        }
      }
    }
    if (!metal::simd_all(finite)) {
      for (int k = 0; k < kKeys && first + k < any.end; ++k) {
        FLASHATTN_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          int column = (c * kSimdgroups + int(simdgroup)) * 8 + fragment_c;
          Fragment v = to_fragment(load_pair<0>(values, value_layout, first + k, column, any.end, value_dim));
          FLASHATTN_UNROLL
          for (int i = 0; i < ROW_FRAGMENTS; ++i) {
            float weight = scores[turn][(i * 8 + fragment_r) * kStride + k];
            output[i][c] += Fragment{not_finite_term(weight, v.x), not_finite_term(weight, v.y)};
          }
        }
      }
    }
  }

  RowOutputs<T> outputs = FLASHATTN_ROW_OUTPUTS(T);
  if (lane == 0) {
    FLASHATTN_UNROLL
    for (int r = 0; r < kRowsEach; ++r) {
      int row = first_row + int(simdgroup) * kRowsEach + r, head = kv_head * heads + row % heads;
      if (row <= last_row) {
        RowResult result = finish_row(softmax[r], sinks, params, batch, head);
        normalise[int(simdgroup) * kRowsEach + r] = result.normalise;
        outputs.store_result(params, batch, head, row / heads, result);
      }
    }
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  FLASHATTN_UNROLL
  for (int i = 0; i < ROW_FRAGMENTS; ++i) {
    if (first_row + i * 8 + fragment_r > last_row) {
      continue;
    }
    float factor = normalise[i * 8 + fragment_r];
    device T* target = outputs.out_row(params, batch, rows[i].head, rows[i].query);
    FLASHATTN_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      FLASHATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        int column = (c * kSimdgroups + int(simdgroup)) * 8 + fragment_c + e;
        if (column < value_dim) {
          float number = output[i][c][e] * factor;
          target[column] = T(number);
          if (has_exact_out) outputs.exact_row(params, batch, rows[i].head, rows[i].query)[column] = number;
        }
      }
    }
  }
}
