// Computes delta, one number per query. backward_dq and backward_dkv read it, so they can run concurrently and need not
// read the forward pass's output. `out` is exact_out, or out if that is float32.
#include "arguments.h"
#include "score_gradient.h"

using namespace flashattn;

// Each SIMD group computes one row. Grid: (divide_up(query_len, ROWS), heads, batch) threadgroups of ROWS SIMD groups.
template <typename T, typename Sizes>
FLASHATTN_KERNEL(Sizes::rows)
backward_delta(FLASHATTN_VALUE(AttentionParams, params), FLASHATTN_VALUE(BackwardParams, backward),
               FLASHATTN_READ(float, out), FLASHATTN_READ(T, dout), FLASHATTN_READ(float, dlse),
               FLASHATTN_WRITTEN(float, delta), FLASHATTN_POSITION) {
  constexpr int ROWS = Sizes::rows;
  int query = int(group.x) * ROWS + int(simdgroup), head = int(group.y), batch = int(group.z);
  if (query >= params.query_len) {
    return;
  }
  const device float* out_row = head_of(out, params, params.out, batch, head) + query * params.out.row;
  const device T* dout_row = head_of(dout, params, backward.dout, batch, head) + query * backward.dout.row;
  float sum = 0;
  for (int column = int(lane); column < value_dim; column += FLASHATTN_LANES) {
    sum = multiply_add(float(dout_row[column * backward.dout.column]), out_row[column * params.out.column], sum);
  }
  sum = FLASHATTN_LANE_SUM(sum);
  sum -= head_of(dlse, params, backward.dlse, batch, head)[query * backward.dlse.row];
  if (lane == 0) {
    delta[delta_offset(params, batch, head) + query] = sum;
  }
}
