// In some kernels, each block computes one chunk of the keys. The last block to finish merges the partial results.
#pragma once

#include "decode_split.h"
#include "kernel.h"
#include "merged_slice.h"

#define FLASHATTN_SPLIT_ARGUMENTS      \
  FLASHATTN_VALUE(SplitParams, split); \
  FLASHATTN_WRITTEN(uint, arrivals);   \
  Partials<float*> partials(static_cast<float*>(arguments.arrays[FLASHATTN_BINDING_partials]), params, split)

namespace flashattn {

// Whether this block is the last of `count` blocks to call this function. If it is, it can read the partial results of
// all these blocks. All threads of a block must call is_last() after they have written their results. arrived: counts
// the blocks that have called the function; it is 0 between launches.
FLASHATTN_FUNC bool is_last(uint* arrived, int count) {
  __threadfence();  // before the block arrives, its results become visible to other blocks
  __syncthreads();
  bool last = threadIdx.x == 0 && atomicAdd(arrived, 1u) == uint(count - 1);
  if (last) *arrived = 0;
  last = __syncthreads_or(last) != 0;
  __threadfence();
  return last;
}

// Writes some columns of a row whose partial results have been merged. The thread that has the row's first column also
// writes lse and row_stats.
template <typename T>
FLASHATTN_FUNC void store_slice(const MergedSlice& merged, int column, RowOutputs<T> outputs,
                                const AttentionParams& params, const uchar* sinks, int batch, RowPosition position) {
  RowResult result = finish_row(merged.softmax, sinks, params, batch, position.head);
  T* row = outputs.out_row(params, batch, position.head, position.query);
  FLASHATTN_UNROLL
  for (int i = 0; i < kSlice; ++i) row[column + i] = T(merged.slice.columns[i] * result.normalise);
  if (has_exact_out) {
    float* exact = outputs.exact_row(params, batch, position.head, position.query);
    FLASHATTN_UNROLL
    for (int i = 0; i < kSlice; ++i) exact[column + i] = merged.slice.columns[i] * result.normalise;
  }
  if (column == 0) outputs.store_result(params, batch, position.head, position.query, result);
}

// Merges the partial results of row_count rows of a key/value head, in the order of the chunks. All THREADS threads of
// a block must call it.
template <int THREADS, typename T>
FLASHATTN_FUNC void merge_chunks(RowOutputs<T> outputs, const AttentionParams& params, const uchar* sinks,
                                 Partials<float*> partials, const SplitParams& split, int batch, int kv_head,
                                 int first_row, int row_count) {
  constexpr int kAtOnce = 17;  // two rounds of loads for 33 chunks (an H100 with four key/value heads)
  for (int at = threadIdx.x; at < row_count * kSlices; at += THREADS) {
    RowPosition position = row_position(first_row + at / kSlices, kv_head, params.num_heads / params.num_kv_heads);
    int column = at % kSlices * kSlice;
    int64_t first = partial_index(params, split, batch, position.head, position.query, 0);
    MergedSlice merged;
    merged.merge<kAtOnce>(split.num_chunks, [&](int chunk, OnlineSoftmax& softmax, Slice& slice) {
      softmax = OnlineSoftmax{partials.max[first + chunk], partials.sum[first + chunk]};
      slice = *reinterpret_cast<const Slice*>(partials.out + (first + chunk) * value_dim + column);
    });
    store_slice(merged, column, outputs, params, sinks, batch, position);
  }
}

}  // namespace flashattn
