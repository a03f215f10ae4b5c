// A SIMD group computes one row.
#pragma once

#include "decode_rows.h"
#include "epilogue.h"

namespace flashattn {

// Computes one row of the output, but does not add the sink. The row attends to keys in the span `any`. Keys in the
// span `all`, a part of `any`, need no test of the mask.
template <int D, int DV, typename T, typename K>
FLASHATTN_FUNC DecodeRows<T, D, DV, 1> attended_row(const FLASHATTN_DEVICE T* query, StoredInputs<K> stored,
                                                    Visibility visibility, int batch, int kv_head, RowPosition position,
                                                    KeySpan any, KeySpan all, uint lane) {
  FLASHATTN_UNIFORM AttentionParams& params = *visibility.params;
  FLASHATTN_THREAD DecodeRows<T, D, DV, 1> row;
  row.load(query, position, visibility, batch, lane);
  row.attend(keys_of(stored, params, batch, kv_head), values_of(stored, params, batch, kv_head), visibility, all,
             any.begin, any.end, row.kKeys, 0, lane);
  return row;
}

// Finishes and stores a row that attended_row() has computed.
template <typename Rows, typename T>
FLASHATTN_FUNC void store_row(FLASHATTN_THREAD Rows& row, RowOutputs<T> outputs,
                              FLASHATTN_UNIFORM AttentionParams& params, const FLASHATTN_DEVICE uchar* sinks, int batch,
                              uint lane) {
  int head = row.first.head, query = row.first.query;
  RowResult result = finish_row(row.softmax[0], sinks, params, batch, head);
  store_lane_columns(outputs.out_row(params, batch, head, query), row.output[0], result.normalise, lane);
  if (has_exact_out) {
    store_lane_columns(outputs.exact_row(params, batch, head, query), row.output[0], result.normalise, lane);
  }
  if (lane == 0) {
    outputs.store_result(params, batch, head, query, result);
  }
}

}  // namespace flashattn
