// What kernels that cut the keys into chunks have alike: where a block leaves its chunks' results, and how results of
// parts become one.
#pragma once

#include "decode_split.h"
#include "kernel.h"
#include "merged_slice.h"

#define FLASHATTN_SPLIT_ARGUMENTS        \
  FLASHATTN_VALUE(SplitParams, split);   \
  FLASHATTN_WRITTEN(float, partial_out); \
  FLASHATTN_WRITTEN(float, partial_max); \
  FLASHATTN_WRITTEN(float, partial_sum); \
  FLASHATTN_WRITTEN(uint, arrivals)
#define FLASHATTN_PARTIALS (Partials<float*>{partial_out, partial_max, partial_sum})

namespace flashattn {

// By all of a block's threads, once its partial results are written. The block of a key/value head that comes last has
// all of them, and merges them in the order of their chunks. arrivals: for each key/value head, 0 between launches.
template <int THREADS, typename T>
FLASHATTN_FUNC void merge_if_last(uint* arrivals, RowOutputs<T> outputs, const AttentionParams& params,
                                  const float* sinks, Partials<float*> partials, const SplitParams& split,
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
  for (int at = threadIdx.x; at < group * params.query_len * kSlices; at += THREADS) {
    RowPosition position = row_position(at / kSlices, block.head, group);
    int column = at % kSlices * kSlice;
    int64_t first = partial_index(params, split, block.batch, position.head, position.query, 0);
    MergedSlice merged;
    merged.merge(split.num_chunks, [&](int chunk, OnlineSoftmax& softmax, Slice& slice) {
      softmax = OnlineSoftmax{partials.max[first + chunk], partials.sum[first + chunk]};
      slice = *reinterpret_cast<const Slice*>(partials.out + (first + chunk) * value_dim + column);
    });
    RowResult result = finish_row(merged.softmax, sinks, params, block.batch, position.head);
    T* row = outputs.out_row(params, block.batch, position.head, position.query);
    FLASHATTN_UNROLL
    for (int i = 0; i < kSlice; ++i) row[column + i] = T(merged.slice.columns[i] * result.normalise);
    if (column == 0) outputs.store_result(params, block.batch, position.head, position.query, result);
  }
}

}  // namespace flashattn
