// metal_rowwise: the textbook schedule, 32 rows against 32 keys, one thread a score. A SIMD group has a row, a lane a
// key: maximum and sum are over the SIMD group. Keys and values go through threadgroup memory 32 columns at a time, so
// that any head_dim fits.
#include "arguments.h"
#include "epilogue.h"
#include "stored_rows.h"
#include "visibility.h"

using namespace flashattn;

// Rows of a key/value head: its query heads side by side, query after query. D and DV: head_dim and value_dim rounded
// up to whole lanes. Grid: (rows / 32, kv_heads, batch) threadgroups of 1024 threads.
template <typename T, int D, int DV, typename K = T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rowwise(
    FLASHATTN_TENSORS(T, K), FLASHATTN_QUANTISED_INPUTS, FLASHATTN_OUTPUTS(T), FLASHATTN_PARAMS,
    FLASHATTN_OPTIONAL_INPUTS, FLASHATTN_SINKS, uint3 threadgroup_index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr int kRows = 32, kKeys = 32;
  constexpr int kChunks = D / FLASHATTN_LANES, kValueChunks = DV / FLASHATTN_LANES;
  threadgroup float tile[kKeys * (FLASHATTN_LANES + 1)];  // the odd stride: a column's elements lie in 32 banks

  int batch = int(threadgroup_index.z), kv_head = int(threadgroup_index.y);
  int group = params.num_heads / params.num_kv_heads;
  int first_row = int(threadgroup_index.x) * kRows;
  int last_row = metal::min(first_row + kRows, params.query_len * group) - 1;
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  int row_index = first_row + int(simdgroup);
  Row row = visibility.row(row_index / group, kv_head * group + row_index % group);

  float query_columns[kChunks];
  RowLayout query_layout = row_layout(params.query);
  const device T* queries = head_of(query, params, params.query, batch, row.head);
  FLASHATTN_UNROLL
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    int column = chunk * FLASHATTN_LANES + int(lane);
    bool inside = row_index <= last_row && (D == head_dim || column < head_dim);
    query_columns[chunk] = inside ? float(queries[query_layout.offset(row.query, column)]) : 0.0f;
  }
  float output[kValueChunks];
  FLASHATTN_UNROLL
  for (int chunk = 0; chunk < kValueChunks; ++chunk) {
    output[chunk] = 0;
  }
  OnlineSoftmax softmax = empty_row();

  auto keys = FLASHATTN_KEYS(batch, kv_head);
  auto values = FLASHATTN_VALUES(batch, kv_head);
  KeySpan any = visibility.seen_by_any(first_row / group, last_row / group);
  KeySpan all = visibility.seen_by_all(first_row / group, last_row / group);
  int own_key = int(thread_index) / FLASHATTN_LANES, own_column = int(thread_index) % FLASHATTN_LANES;
  for (int first = any.begin; first < any.end; first += kKeys) {
    bool own_exists = first + own_key < any.end;
    float product = 0;
    FLASHATTN_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      int column = chunk * FLASHATTN_LANES + own_column;
      bool inside = own_exists && (D == head_dim || column < head_dim);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the previous tile has been read
      tile[own_key * (FLASHATTN_LANES + 1) + own_column] = inside ? keys.element(first + own_key, column) : 0.0f;
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      for (int i = 0; i < FLASHATTN_LANES; ++i) {
        float q = metal::simd_shuffle(query_columns[chunk], ushort(i));
        product = metal::fma(q, tile[int(lane) * (FLASHATTN_LANES + 1) + i], product);
      }
    }

    bool shown = all.contains(first, kKeys);
    float score = visibility.score(product, row, first + int(lane));
    if (!shown) {
      score = visibility.masked(score, row, first + int(lane));
    }
    float rescale = softmax.raise(metal::simd_max(score));
    float probability = softmax.probability(score);
    softmax.row_sum += metal::simd_sum(probability);

    FLASHATTN_UNROLL
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      int column = chunk * FLASHATTN_LANES + own_column;
      bool inside = own_exists && (DV == value_dim || column < value_dim);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      tile[own_key * (FLASHATTN_LANES + 1) + own_column] = inside ? values.element(first + own_key, column) : 0.0f;
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      float sum = output[chunk] * rescale;
      for (int j = 0; j < kKeys; ++j) {
        float p = metal::simd_shuffle(probability, ushort(j));
        if (shown || p != 0) {  // a value that the row does not see may be NaN or infinite
          sum = metal::fma(p, tile[j * (FLASHATTN_LANES + 1) + int(lane)], sum);
        }
      }
      output[chunk] = sum;
    }
  }

  if (row_index > last_row) {
    return;
  }
  RowResult result = finish_row(softmax, sinks, params, batch, row.head);
  device T* target = out_row(out, params, batch, row.head, row.query);
  FLASHATTN_UNROLL
  for (int chunk = 0; chunk < kValueChunks; ++chunk) {
    int column = chunk * FLASHATTN_LANES + int(lane);
    if (DV == value_dim || column < value_dim) {
      target[column] = T(output[chunk] * result.normalise);
    }
  }
  if (lane == 0) {
    *lse_of(lse, params, batch, row.head, row.query) = result.lse;
  }
}
