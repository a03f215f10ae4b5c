// metal_decode_parallel is for one query. The keys are divided among 32 SIMD groups per head, which merge their results
// in threadgroup memory.
#include "arguments.h"
#include "decode_rows.h"
#include "epilogue.h"

using namespace flashattn;

// Grid: (1, heads, batch) threadgroups of 1024 threads.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL(32)
decode_parallel(FLASHATTN_INPUT_ARGUMENTS(T, K), FLASHATTN_OUTPUT_ARGUMENTS(T), FLASHATTN_POSITION) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim;
  using Rows = DecodeRows<T, D, DV, 1>;
  constexpr int kSimdgroups = 32;
  int batch = int(group.z), head = int(group.y);
  int kv_head = head / (params.num_heads / params.num_kv_heads);
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  thread Rows rows;
  rows.load(query, RowPosition{0, head, head, 1}, visibility, batch, lane);

  auto keys = keys_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head);
  auto values = values_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head);
  KeySpan any = visibility.seen(0), all = visibility.seen_by_all(0, 0);
  rows.attend(keys, values, visibility, all, any.begin + int(simdgroup) * Rows::kKeys, any.end,
              kSimdgroups * Rows::kKeys, 0, lane);

  // Merges the results, in passes over the columns, because threadgroup memory holds only 32 * kPass columns at once.
  // Lane n reads the result of SIMD group n. The odd stride puts a column's 32 partial results into 32 banks.
  constexpr int kPass = Rows::kValueColumns < 4 ? Rows::kValueColumns : 4;  // columns per lane and pass
  constexpr int kStride = kSimdgroups + 1;
  threadgroup float partial_max[kSimdgroups];
  threadgroup float partial_sum[kSimdgroups];
  threadgroup float partial_output[FLASHATTN_LANES * kPass * kStride];
  if (lane == 0) {
    partial_max[simdgroup] = rows.softmax[0].row_max;
    partial_sum[simdgroup] = rows.softmax[0].row_sum;
  }
  float weight = 0;
  RowResult result = RowResult{0.0f, 0.0f, empty_row()};
  RowOutputs<T> outputs = FLASHATTN_ROW_OUTPUTS(T);
  device T* row = outputs.out_row(params, batch, head, 0);
  FLASHATTN_UNROLL
  for (int pass = 0; pass < Rows::kValueColumns; pass += kPass) {
    if (pass > 0) {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the previous pass's results have been read
    }
    FLASHATTN_UNROLL
    for (int i = 0; i < kPass; ++i) {
      if (pass + i < Rows::kValueColumns) {
        partial_output[(i * FLASHATTN_LANES + int(lane)) * kStride + int(simdgroup)] = rows.output[0][pass + i];
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (pass == 0) {
      float lane_max = partial_max[lane];
      OnlineSoftmax whole = empty_row();
      whole.raise(metal::simd_max(lane_max));
      weight = whole.probability(lane_max);
      whole.row_sum = metal::simd_sum(weight * partial_sum[lane]);
      result = finish_row(whole, sinks, params, batch, head);
      weight *= result.normalise;
    }
    // SIMD group g merges the columns that lane g of each SIMD group computed.
    FLASHATTN_UNROLL
    for (int i = 0; i < kPass; ++i) {
      if (pass + i < Rows::kValueColumns) {
        float merged =
            metal::simd_sum(weight * partial_output[(i * FLASHATTN_LANES + int(simdgroup)) * kStride + int(lane)]);
        int column = int(simdgroup) * Rows::kValueColumns + pass + i;
        if (lane == 0 && column < value_dim) {
          row[column] = T(merged);
          if (has_exact_out) outputs.exact_row(params, batch, head, 0)[column] = merged;
        }
      }
    }
  }
  if (lane == 0 && simdgroup == 0) {
    outputs.store_result(params, batch, head, 0, result);
  }
}
