// The kernel metal_rowwise, see rowwise.h.
#include "rowwise.h"

#include "arguments.h"

using namespace flashattn;

// Grid: (divide_up(rows, 32), kv_heads, batch) threadgroups of 1024 threads.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL(kRowwiseRows)
rowwise(FLASHATTN_INPUT_ARGUMENTS(T, K), FLASHATTN_OUTPUT_ARGUMENTS(T), FLASHATTN_POSITION) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim;
  threadgroup float tile[kRowwiseTile];
  rowwise_body<D, DV>(query, FLASHATTN_STORED_INPUTS(K), FLASHATTN_ROW_OUTPUTS(T), params, FLASHATTN_MASK_INPUTS, sinks,
                      tile, int(group.z), int(group.y), int(group.x) * kRowwiseRows, lane, simdgroup, thread_index);
}
