// cuda_decode for quantised keys and values, and the merge of every cuda_decode: see decode_split.h.
#include "decode_split.h"

#include "kernel.h"

using namespace flashattn;

#define FLASHATTN_PARTIALS(ACCESS) \
  ACCESS(float, partial_out);      \
  ACCESS(float, partial_max);      \
  ACCESS(float, partial_sum);      \
  FLASHATTN_VALUE(SplitParams, split)

// A warp has a chunk of keys and ROWS rows of a key/value head. Those that have other rows of the chunk are beside it,
// and find its keys in the cache. Blocks: kv_heads and batch elements for each WARPS warps.
template <typename T, int D, int DV, int ROWS, int WARPS, typename K = T>
FLASHATTN_KERNEL decode_split(const cuda::Arguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_PARTIALS(FLASHATTN_WRITTEN);
  BlockPosition block = block_position(params, params.num_kv_heads);
  int group = params.num_heads / params.num_kv_heads, row_warps = (params.query_len * group + ROWS - 1) / ROWS;
  int warp = block.part * WARPS + int(warp_index()), chunk = warp / row_warps;
  if (chunk >= split.num_chunks) {
    return;
  }
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, block.batch);
  DecodeRows<T, D, DV, ROWS> rows;
  rows.load(query, row_position(warp % row_warps * ROWS, block.head, group), visibility, block.batch, lane_index());

  auto keys = keys_of(FLASHATTN_STORED_INPUTS(K), params, block.batch, block.head);
  auto values = values_of(FLASHATTN_STORED_INPUTS(K), params, block.batch, block.head);
  KeySpan any = seen_in_chunk(visibility, split, chunk), all = visibility.seen_by_all(0, params.query_len - 1);
  rows.attend(keys, values, visibility, all, any.begin, any.end, rows.kKeys, 0, lane_index());
  store_partials(rows, {partial_out, partial_max, partial_sum}, params, split, block.batch, chunk, lane_index());
}

// A warp for each row. Blocks: heads and batch elements for each query.
template <typename T, int DV>
FLASHATTN_KERNEL decode_merge(const cuda::Arguments& arguments) {
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  FLASHATTN_VALUE(AttentionParams, params);
  FLASHATTN_PARTIALS(FLASHATTN_READ);
  BlockPosition block = block_position(params, params.num_heads);
  decode_merge_body<DV>(FLASHATTN_ROW_OUTPUTS(T), params, sinks, {partial_out, partial_max, partial_sum}, split,
                        block.batch, block.head, block.part, lane_index());
}
