// What kernels that cut the keys into chunks have alike: where a block leaves its chunks' results, and how the last one
// merges them.
#pragma once

#include "decode_split.h"
#include "kernel.h"

#define FLASHATTN_SPLIT_ARGUMENTS        \
  FLASHATTN_VALUE(SplitParams, split);   \
  FLASHATTN_WRITTEN(float, partial_out); \
  FLASHATTN_WRITTEN(float, partial_max); \
  FLASHATTN_WRITTEN(float, partial_sum); \
  FLASHATTN_WRITTEN(uint, arrivals)
#define FLASHATTN_PARTIALS(Pointer) (Partials<Pointer>{partial_out, partial_max, partial_sum})

namespace flashattn {

// By all of a block's threads, once its partial results are written. The block of a key/value head that comes last has
// all of them, and merges them in the order of their chunks. arrivals: for each key/value head, 0 between launches.
template <int DV, int WARPS, typename T>
FLASHATTN_FUNC void merge_if_last(uint* arrivals, RowOutputs<T> outputs, const AttentionParams& params,
                                  const float* sinks, Partials<const float*> partials, const SplitParams& split,
                                  BlockPosition block) {
  uint* arrived = arrivals + block.batch * params.num_kv_heads + block.head;
  bool last = false;
  __threadfence();  // before the block arrives, its results are there for all others
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1u) == uint(block.parts - 1);
    if (last) *arrived = 0;
  }
  if (!__syncthreads_or(last)) return;
  __threadfence();
  int group = params.num_heads / params.num_kv_heads;
  for (int row = warp_index(); row < group * params.query_len; row += WARPS) {
    RowPosition position = row_position(row, block.head, group);
    decode_merge_body<DV>(outputs, params, sinks, partials, split, block.batch, position.head, position.query,
                          lane_index());
  }
}

}  // namespace flashattn
