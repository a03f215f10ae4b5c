// The kernel cuda_rowwise, see rowwise.h.
#include "rowwise.h"

#include "kernel.h"

using namespace flashattn;

// Each key/value head and batch element has one block of 1,024 threads per 32 rows.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL rowwise(const cuda::Arguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim;
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  __shared__ float tile[kRowwiseTile];
  BlockPosition block = block_position(params, params.num_kv_heads);
  rowwise_body<D, DV>(query, FLASHATTN_STORED_INPUTS(K), FLASHATTN_ROW_OUTPUTS(T), params, FLASHATTN_MASK_INPUTS, sinks,
                      tile, block.batch, block.head, block.part * kRowwiseRows, lane_index(), warp_index(),
                      threadIdx.x);
}
