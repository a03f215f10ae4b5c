// The kernel cuda_prefill for all calls that prefill_hopper.cu does not support. A block computes some queries of one
// head, and divides them among its warps. It loops over tiles of keys and values. While the tensor cores work on one
// tile, threads copy the next one to shared memory.
#include "kernel.h"
#include "mapped_tiles.h"
#include "warp_rows.h"

using namespace flashattn;

// D and DV: head_dim and value_dim, rounded up to whole steps of the tensor cores. KEYS: keys per tile. Sizes::parts:
// how many 16-bit floats represent a probability. K: the type of keys and values. Quantised ones are read as the 16-bit
// parts that float_parts.cu makes of them. Each head and batch element has one block per WARPS * 16 queries.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL prefill(const cuda::Arguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, WARPS = Sizes::warps, KEYS = Sizes::keys;
  constexpr int KEY_PARTS = Sizes::key_parts, VALUE_PARTS = Sizes::value_parts;
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_READ(T, key_parts);
  FLASHATTN_READ(T, value_parts);
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kRows = WARPS * kWarpRows, kThreads = WARPS * FLASHATTN_LANES;
  using Queries = SharedTile<T, kRows, D>;
  using Tiles = CopiedTiles<T, KEYS, D, DV, 2, kThreads, KEY_PARTS, VALUE_PARTS>;
  extern __shared__ __align__(1024) uchar shared[];

  BlockPosition block = block_position(params, params.num_heads);
  int batch = block.batch, head = block.head, kv_head = head / (params.num_heads / params.num_kv_heads);
  int first_row = first_query(params, block.part, kRows), last_row = minimum(first_row + kRows, params.query_len) - 1;
  int lane = lane_index(), own_row = int(warp_index()) * kWarpRows, own_query = first_row + own_row;
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  Range queries_of_block = {first_row, last_row};
  TileList list = {reinterpret_cast<uint*>(shared + Queries::kBytes + Tiles::kBytes)};
  KeyTiles<kRows, WARPS, KEYS> next(visibility, queries_of_block, int(warp_index()), list);
  next.template find<kThreads>(head, queries_of_block);
  if (has_block_map) __syncthreads();
  next.begin();
  Queries queries = {shared_address(shared)};
  Tiles tiles = {queries.memory + Queries::kBytes};
  tiles.thread = threadIdx.x;
  if constexpr (is_quantised<K>) {
    int64_t heads = params.num_kv_heads, len = params.key_len;
    tiles.key_rows = {key_parts + (batch * KEY_PARTS * heads + kv_head) * len * head_dim, {head_dim, 1}};
    tiles.value_rows = {value_parts + (batch * VALUE_PARTS * heads + kv_head) * len * value_dim, {value_dim, 1}};
    tiles.part_rows = heads * len;
  } else {
    auto stored = FLASHATTN_STORED_INPUTS(K);
    tiles.key_rows = keys_of(stored, params, batch, kv_head);
    tiles.value_rows = values_of(stored, params, batch, kv_head);
  }
  const auto load = [&](int n) {
    tiles.load(n, next.first(), next.any.end);
    commit_copies();
  };
  RowLayout layout = row_layout(params.query);
  const T* head_queries = head_of(query, params, params.query, batch, head);
  queries.template load<kThreads>(head_queries + layout.offset(first_row, 0), layout, params.query_len - first_row,
                                  head_dim, threadIdx.x);
  load(0);

  AttendingRows<T, T, kRows, D, DV, KEYS> rows;
  rows.begin(visibility, own_query, head, 1, lane);
  rows.queries = own_rows(queries, own_row);
  for (int n = 0; next.is_there(); ++n) {
    int first = next.first();
    bool is_needed = next.is_needed(), is_unmasked = next.is_unmasked();
    wait_for_copies<0>();
    __syncthreads();  // the tile has arrived, and all warps have read the previous tile
    next.next();
    load(n + 1);
    if (is_needed) rows.template attend<Sizes::parts>(tiles, n, visibility, first, is_unmasked, lane);
  }
  wait_for_copies<0>();  // if there was no tile, the queries' copies may be unfinished
  rows.finish(visibility);
  uint not_finite = rows.store(FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, lane);
  attend_again(not_finite, FLASHATTN_ROW_OUTPUTS(T), query, FLASHATTN_STORED_INPUTS(K), visibility, sinks, batch, head,
               own_query, lane);
}
