// delta: one number for each row, which dq needs once, and dk and dv for each tile.
#include "kernel.h"
#include "score_gradient.h"

using namespace flashattn;

// A warp has a row. Blocks: heads and batch elements for each WARPS queries.
template <typename T, int WARPS>
FLASHATTN_KERNEL backward_delta(const cuda::BackwardArguments& arguments) {
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_VALUE(BackwardParams, backward);
  FLASHATTN_READ(T, out);
  FLASHATTN_READ(T, dout);
  FLASHATTN_READ(float, dlse);
  FLASHATTN_WRITTEN(float, delta);
  BlockPosition block = block_position(params, params.num_heads);
  int query = block.part * WARPS + int(warp_index());
  if (query >= params.query_len) return;
  float sum = delta_of(out, dout, dlse, params, backward, block.batch, block.head, query, lane_index());
  if (lane_index() == 0) delta[delta_offset(params, block.batch, block.head) + query] = sum;
}
