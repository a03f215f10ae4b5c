// metal_decode_fast is for one query and few keys. One SIMD group computes a head, without threadgroup memory.
#include "arguments.h"
#include "single_row.h"

using namespace flashattn;

// Grid: (1, heads, batch) threadgroups of 32 threads.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL(1)
decode_fast(FLASHATTN_INPUT_ARGUMENTS(T, K), FLASHATTN_OUTPUT_ARGUMENTS(T), FLASHATTN_POSITION) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim;
  int batch = int(group.z), head = int(group.y);
  int kv_head = head / (params.num_heads / params.num_kv_heads);
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  auto row = attended_row<D, DV>(query, FLASHATTN_STORED_INPUTS(K), visibility, batch, kv_head,
                                 RowPosition{0, head, head, 1}, visibility.seen(0), visibility.seen_by_all(0, 0), lane);
  store_row(row, FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, lane);
}
