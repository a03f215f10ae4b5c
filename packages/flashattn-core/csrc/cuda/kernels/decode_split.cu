// The kernel cuda_decode for calls that decode.cu does not support: those with a large head_dim, or with quantised keys
// that tensor cores do not multiply as integers. A warp computes ROWS rows of a key/value head over a chunk of keys.
// Neighbouring warps compute other rows over the same chunk, so that its keys stay in the cache.
#include "split_keys.h"

using namespace flashattn;

// Each key/value head and batch element has one warp per chunk and ROWS rows. A block has WARPS warps.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL decode_split(const cuda::Arguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, ROWS = Sizes::rows, WARPS = Sizes::warps;
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_SPLIT_ARGUMENTS;
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  BlockPosition block = block_position(params, params.num_kv_heads);
  int group = params.num_heads / params.num_kv_heads, row_warps = (params.query_len * group + ROWS - 1) / ROWS;
  int warp = block.part * WARPS + int(warp_index());
  decode_split_body<D, DV, ROWS>(query, FLASHATTN_STORED_INPUTS(K), params, FLASHATTN_MASK_INPUTS, partials, split,
                                 block.batch, block.head, warp / row_warps, warp % row_warps * ROWS, lane_index());
  if (is_last(arrivals + block.batch * params.num_kv_heads + block.head, block.parts)) {
    merge_chunks<WARPS * FLASHATTN_LANES>(FLASHATTN_ROW_OUTPUTS(T), params, sinks, partials, split, block.batch,
                                          block.head, 0, group * params.query_len);
  }
}
