// cuda_decode for quantised keys and values and for large heads: a warp has a chunk of keys and ROWS rows of a
// key/value head. Those that have other rows of the chunk are beside it, and find its keys in the cache.
#include "split_keys.h"

using namespace flashattn;

// Blocks: kv_heads and batch elements for each WARPS warps.
template <typename T, int D, int DV, int ROWS, int WARPS, typename K = T>
FLASHATTN_KERNEL decode_split(const cuda::Arguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_SPLIT_ARGUMENTS;
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  BlockPosition block = block_position(params, params.num_kv_heads);
  int group = params.num_heads / params.num_kv_heads, row_warps = (params.query_len * group + ROWS - 1) / ROWS;
  int warp = block.part * WARPS + int(warp_index()), chunk = warp / row_warps;
  if (chunk < split.num_chunks) {
    Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, block.batch);
    DecodeRows<T, D, DV, ROWS> rows;
    rows.load(query, row_position(warp % row_warps * ROWS, block.head, group), visibility, block.batch, lane_index());

    auto keys = keys_of(FLASHATTN_STORED_INPUTS(K), params, block.batch, block.head);
    auto values = values_of(FLASHATTN_STORED_INPUTS(K), params, block.batch, block.head);
    KeySpan any = seen_in_chunk(visibility, split, chunk), all = visibility.seen_by_all(0, params.query_len - 1);
    rows.attend(keys, values, visibility, all, any.begin, any.end, rows.kKeys, 0, lane_index());
    store_partials(rows, partials, params, split, block.batch, chunk, lane_index());
  }
  if (is_last(arrivals + block.batch * params.num_kv_heads + block.head, block.parts)) {
    merge_chunks<WARPS * FLASHATTN_LANES>(FLASHATTN_ROW_OUTPUTS(T), params, sinks, partials, split, block.batch,
                                          block.head, 0, group * params.query_len);
  }
}
