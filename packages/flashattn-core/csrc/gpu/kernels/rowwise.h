// The simplest attention kernel. A threadgroup computes the scores of 32 rows and 32 keys at a time, with one thread
// per score. Each SIMD group has one row, and each of its lanes has one key, so maximum and sum are reductions over the
// SIMD group. Keys and values pass through threadgroup memory 32 columns at a time, so that any head_dim fits.
#pragma once

#include "epilogue.h"
#include "stored_rows.h"
#include "visibility.h"

namespace flashattn {

enum : int {
  kRowwiseRows = 32,
  kRowwiseKeys = FLASHATTN_LANES,
  kRowwiseStride = FLASHATTN_LANES + 1,  // odd, so that a column's elements are in 32 different banks
  kRowwiseTile = kRowwiseKeys * kRowwiseStride,
};

// Computes kRowwiseRows rows of a key/value head, from first_row on. Rows are numbered by query, then by query head. D
// and DV: head_dim and value_dim, rounded up to a multiple of FLASHATTN_LANES. tile: kRowwiseTile floats. All
// kRowwiseRows SIMD groups of a threadgroup must call it.
template <int D, int DV, typename T, typename K>
FLASHATTN_FUNC void rowwise_body(const FLASHATTN_DEVICE T* query, StoredInputs<K> stored, RowOutputs<T> outputs,
                                 FLASHATTN_UNIFORM AttentionParams& params, MaskInputs masks,
                                 const FLASHATTN_DEVICE uchar* sinks, FLASHATTN_SHARED float* tile, int batch,
                                 int kv_head, int first_row, uint lane, uint simdgroup, uint thread_index) {
  constexpr int kChunks = D / FLASHATTN_LANES, kValueChunks = DV / FLASHATTN_LANES;
  int group = params.num_heads / params.num_kv_heads;
  int last_row = minimum(first_row + kRowwiseRows, params.query_len * group) - 1;
  Visibility visibility = visibility_of(params, masks, batch);
  int row_index = first_row + int(simdgroup);
  Row row = visibility.row(row_index / group, kv_head * group + row_index % group);

  float query_columns[kChunks];
  RowLayout query_layout = row_layout(params.query);
  const FLASHATTN_DEVICE T* queries = head_of(query, params, params.query, batch, row.head);
  FLASHATTN_UNROLL
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    int column = chunk * FLASHATTN_LANES + int(lane);
    bool inside = row_index <= last_row && (D == head_dim || column < head_dim);
    query_columns[chunk] = inside ? float(queries[query_layout.offset(row.query, column)]) : 0.0f;
  }
  float output[kValueChunks] = {};
  OnlineSoftmax softmax = empty_row();

  auto keys = keys_of(stored, params, batch, kv_head);
  auto values = values_of(stored, params, batch, kv_head);
  KeySpan any = visibility.seen_by_any(first_row / group, last_row / group);
  KeySpan all = visibility.unmasked(first_row / group, last_row / group);
  int own_key = int(thread_index) / FLASHATTN_LANES, own_column = int(thread_index) % FLASHATTN_LANES;
  for (int first = any.begin; first < any.end; first += kRowwiseKeys) {
    int blocks = visibility.blocks(kv_head * group, group, first_row / group, last_row / group - first_row / group + 1,
                                   first, kRowwiseKeys);
    if (!(blocks & kBlockShows)) {
      continue;
    }
    bool own_exists = first + own_key < any.end;
    float product = 0;
    FLASHATTN_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      int column = chunk * FLASHATTN_LANES + own_column;
      bool inside = own_exists && (D == head_dim || column < head_dim);
      FLASHATTN_BARRIER;  // the previous tile has been read
      tile[own_key * kRowwiseStride + own_column] = inside ? keys.element(first + own_key, column) : 0.0f;
      FLASHATTN_BARRIER;
      for (int i = 0; i < FLASHATTN_LANES; ++i) {
        float q = FLASHATTN_LANE_VALUE(query_columns[chunk], i);
        product = multiply_add(q, tile[int(lane) * kRowwiseStride + i], product);
      }
    }

    bool unmasked = all.contains(first, kRowwiseKeys) && !(blocks & kBlockChanges);
    float score = visibility.score(product, row, first + int(lane));
    if (!unmasked) {
      score = visibility.masked(score, row, first + int(lane));
    }
    float rescale = softmax.raise(FLASHATTN_LANE_MAX(score));
    float probability = softmax.probability(score);
    softmax.row_sum += FLASHATTN_LANE_SUM(probability);

    FLASHATTN_UNROLL
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      int column = chunk * FLASHATTN_LANES + own_column;
      bool inside = own_exists && (DV == value_dim || column < value_dim);
      FLASHATTN_BARRIER;
      tile[own_key * kRowwiseStride + own_column] = inside ? values.element(first + own_key, column) : 0.0f;
      FLASHATTN_BARRIER;
      float sum = output[chunk] * rescale;
      for (int j = 0; j < kRowwiseKeys; ++j) {
        float p = FLASHATTN_LANE_VALUE(probability, j);
        if (unmasked || p != 0) {  // the value of a hidden key may be NaN or infinite
          sum = multiply_add(p, tile[j * kRowwiseStride + int(lane)], sum);
        }
      }
      output[chunk] = sum;
    }
  }

  if (row_index > last_row) {
    return;
  }
  RowResult result = finish_row(softmax, sinks, params, batch, row.head);
  FLASHATTN_DEVICE T* target = outputs.out_row(params, batch, row.head, row.query);
  FLASHATTN_UNROLL
  for (int chunk = 0; chunk < kValueChunks; ++chunk) {
    int column = chunk * FLASHATTN_LANES + int(lane);
    if (DV == value_dim || column < value_dim) {
      float number = output[chunk] * result.normalise;
      target[column] = T(number);
      if (has_exact_out) outputs.exact_row(params, batch, row.head, row.query)[column] = number;
    }
  }
  if (lane == 0) {
    outputs.store_result(params, batch, row.head, row.query, result);
  }
}

}  // namespace flashattn
