// delta: one number for each row, which dq needs once and dk and dv need for each tile of keys. A launch of its own, so
// that those two can run side by side, and neither of them reads the forward's output.
#include "arguments.h"
#include "score_gradient.h"

using namespace flashattn;

// A SIMD group has a row. Grid: (queries / ROWS, heads, batch) threadgroups of ROWS SIMD groups.
template <typename T, int ROWS>
[[kernel, max_total_threads_per_threadgroup(ROWS* FLASHATTN_LANES)]] void backward_delta(
    const device T* saved_out [[buffer(17)]], const device T* dout [[buffer(19)]],
    const device float* dlse [[buffer(20), function_constant(has_dlse)]], device float* delta [[buffer(21)]],
    FLASHATTN_PARAMS, FLASHATTN_BACKWARD_PARAMS, uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  int query = int(group.x) * ROWS + int(simdgroup), head = int(group.y), batch = int(group.z);
  if (query >= params.query_len) {
    return;
  }
  float sum = delta_of(saved_out, dout, dlse, params, backward, batch, head, query, lane);
  if (lane == 0) {
    delta[delta_offset(params, batch, head) + query] = sum;
  }
}
