// Merges the partial results of prefill_hopper.cu's blocks that share keys. Each warp merges one row.
#include "kernel.h"
#include "merged_slice.h"
#include "shared_keys.h"
#include "split_keys.h"
#include "stored_rows.h"
#include "warp_rows.h"

using namespace flashattn;

// DV: as in prefill_hopper. ROWS: rows per block of prefill_hopper. The grid has one block for every WARPS rows.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL prefill_merge(const cuda::Arguments& arguments) {
  constexpr int DV = Sizes::value_dim, ROWS = Sizes::rows, WARPS = Sizes::warps;
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_VALUE(SplitParams, split);
  FLASHATTN_WRITTEN(float, partials);
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kOwn = (kSlices + FLASHATTN_LANES - 1) / FLASHATTN_LANES;
  BlockPartials<ROWS, DV> results = {partials};
  int lane = lane_index(), row = int(blockIdx.x) * WARPS + int(warp_index()), shared = row / ROWS;
  BlockPosition block = block_position(params, params.num_heads, uint(split.whole_blocks + shared));
  RowPosition position = row_position(first_query(params, block.part, ROWS) + row % ROWS, block.head, 1);
  if (position.query >= params.query_len) return;

  MergedSlice merged[kOwn];
  float probe = 0;  // NaN as soon as one of the numbers is not finite
  FLASHATTN_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    int slice = lane + i * FLASHATTN_LANES;
    merged[i].merge<4>(split.num_chunks, [&](int chunk, OnlineSoftmax& softmax, Slice& part) {
      const float* from = results.row(shared * split.num_chunks + chunk, row % ROWS);
      softmax = OnlineSoftmax{from[DV], from[DV + 1]};
      if (slice < kSlices) part = *reinterpret_cast<const Slice*>(from + slice * kSlice);
    });
    FLASHATTN_UNROLL
    for (int c = 0; c < kSlice; ++c) probe = multiply_add(merged[i].slice.columns[c], 0, probe);
    probe = multiply_add(merged[i].softmax.row_sum, 0, probe);
  }
  RowOutputs<T> outputs = FLASHATTN_ROW_OUTPUTS(T);
  if (__any_sync(~0u, probe != 0)) {
    attend_again(1u, outputs, query, FLASHATTN_STORED_INPUTS(K),
                 visibility_of(params, FLASHATTN_MASK_INPUTS, block.batch), sinks, block.batch, block.head,
                 position.query, lane);
    return;
  }
  FLASHATTN_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    int slice = lane + i * FLASHATTN_LANES;
    if (slice < kSlices) store_slice(merged[i], slice * kSlice, outputs, params, sinks, block.batch, position);
  }
}
