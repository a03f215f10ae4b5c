// metal_decode_fast: one query, few keys. One SIMD group a head, no barriers, no threadgroup memory.
#include "arguments.h"
#include "decode_rows.h"
#include "epilogue.h"

using namespace flashattn;

// Grid: (1, heads, batch) threadgroups of 32 threads.
template <typename T, int D, int DV, typename K = T>
[[kernel, max_total_threads_per_threadgroup(32)]] void decode_fast(FLASHATTN_INPUT_ARGUMENTS(T, K),
                                                                   FLASHATTN_OUTPUT_ARGUMENTS(T),
                                                                   uint3 group [[threadgroup_position_in_grid]],
                                                                   uint lane [[thread_index_in_simdgroup]]) {
  using Rows = DecodeRows<T, D, DV, 1>;
  int batch = int(group.z), head = int(group.y);
  int kv_head = head / (params.num_heads / params.num_kv_heads);
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  thread Rows rows;
  rows.load(query, RowPosition{0, head, head, 1}, visibility, batch, lane);

  auto keys = keys_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head);
  auto values = values_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head);
  KeySpan any = visibility.seen(0), all = visibility.seen_by_all(0, 0);
  rows.attend(keys, values, visibility, all, any.begin, any.end, Rows::kKeys, 0, lane);

  RowResult result = finish_row(rows.softmax[0], sinks, params, batch, head);
  RowOutputs<T> outputs = FLASHATTN_ROW_OUTPUTS(T);
  rows.store(0, outputs.out_row(params, batch, head, 0), result.normalise, lane);
  if (lane == 0) {
    outputs.store_result(params, batch, head, 0, result);
  }
}
