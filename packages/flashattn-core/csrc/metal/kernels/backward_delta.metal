// delta: one number for each row, which dq needs once and dk and dv need for each tile of keys. A launch of its own, so
// that those two can run side by side, and neither of them reads the forward's output.
#include "arguments.h"
#include "score_gradient.h"

using namespace flashattn;

// A SIMD group has a row. Grid: (queries / ROWS, heads, batch) threadgroups of ROWS SIMD groups.
template <typename T, int ROWS>
[[kernel, max_total_threads_per_threadgroup(ROWS* FLASHATTN_LANES)]] void backward_delta(
    FLASHATTN_VALUE(AttentionParams, params), FLASHATTN_VALUE(BackwardParams, backward), FLASHATTN_READ(T, out),
    FLASHATTN_READ(T, dout) FLASHATTN_OPTIONAL(dlse, "", float32, ), FLASHATTN_WRITTEN(float, delta),
    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  int query = int(group.x) * ROWS + int(simdgroup), head = int(group.y), batch = int(group.z);
  if (query >= params.query_len) {
    return;
  }
  float sum = delta_of(out, dout, dlse, params, backward, batch, head, query, lane);
  if (lane == 0) {
    delta[delta_offset(params, batch, head) + query] = sum;
  }
}
