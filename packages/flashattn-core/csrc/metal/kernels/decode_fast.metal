// metal_decode_fast: one query, few keys. One SIMD group a head, no barriers, no threadgroup memory.
#include "decode_rows.h"
#include "epilogue.h"

using namespace flashattn;

// Grid: (1, heads, batch) threadgroups of 32 threads.
template <typename T, int D, int DV>
[[kernel]] void decode_fast(FLASHATTN_TENSORS(T), FLASHATTN_OUTPUTS(T), FLASHATTN_PARAMS, FLASHATTN_OPTIONAL_INPUTS,
                            FLASHATTN_SINKS, uint3 group [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]]) {
  using Rows = DecodeRows<T, D, DV, 1>;
  int batch = int(group.z), head = int(group.y);
  int kv_head = head / (params.num_heads / params.num_kv_heads);
  Visibility visibility = FLASHATTN_VISIBILITY(batch);

  thread Rows rows;
  rows.clear();
  rows.load_query(0, visibility.row(0, head), query, params, batch, lane);

  const device T* keys = head_of(key, params, params.key, batch, kv_head);
  const device T* values = head_of(value, params, params.value, batch, kv_head);
  RowLayout key_layout = row_layout(params.key), value_layout = row_layout(params.value);
  KeySpan any = visibility.seen(0), all = visibility.seen_by_all(0, 0);
  for (int first = any.begin; first < any.end; first += Rows::kKeys) {
    rows.attend(keys + key_layout.offset(first, 0), key_layout, values + value_layout.offset(first, 0), value_layout,
                visibility, first, metal::min(Rows::kKeys, any.end - first), all.contains(first, Rows::kKeys), lane);
  }

  RowResult result = finish_row(rows.softmax[0], sinks, params, batch, head);
  rows.store(0, out_row(out, params, batch, head, 0), result.normalise, lane);
  if (lane == 0) {
    *lse_of(lse, params, batch, head, 0) = result.lse;
  }
}
