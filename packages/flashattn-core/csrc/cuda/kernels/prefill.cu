// The kernel cuda_prefill for all calls that prefill_hopper.cu does not support. A block computes some queries of one
// head, and divides them among its warps. It loops over tiles of keys and values. While the tensor cores work on one
// tile, threads copy the next one to shared memory.
#include "integer_rows.h"
#include "kernel.h"
#include "mapped_tiles.h"

using namespace flashattn;

// D and DV: head_dim and value_dim, rounded up to whole steps of the tensor cores. ROWS: rows per warp, 8 for large
// heads with quantised keys, otherwise 16. KEYS: keys per tile. PARTS: how many 16-bit floats represent a probability.
// K: the type of keys and values. Each head and batch element has one block per WARPS * ROWS queries.
template <typename T, typename Sizes, typename K = T>
FLASHATTN_KERNEL prefill(const cuda::Arguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, ROWS = Sizes::rows, WARPS = Sizes::warps, KEYS = Sizes::keys,
                PARTS = Sizes::parts;
  FLASHATTN_INPUT_ARGUMENTS(T, K);
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kRows = WARPS * ROWS, kThreads = WARPS * FLASHATTN_LANES;
  using Queries = SharedTile<T, kRows, D>;
  using Tiles = CopiedTiles<K, KEYS, D, DV, 2, kThreads>;
  extern __shared__ __align__(1024) uchar shared[];

  BlockPosition block = block_position(params, params.num_heads);
  int batch = block.batch, head = block.head, kv_head = head / (params.num_heads / params.num_kv_heads);
  int first_row = first_query(params, block.part, kRows), last_row = minimum(first_row + kRows, params.query_len) - 1;
  int lane = lane_index(), own_row = int(warp_index()) * ROWS, own_query = first_row + own_row;
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  Range queries_of_block = {first_row, last_row};
  TileList list = {reinterpret_cast<uint*>(shared + (is_quantised<K> ? 0 : Queries::kBytes) + Tiles::kBytes)};
  KeyTiles<kRows, WARPS, KEYS> next(visibility, queries_of_block, int(warp_index()), list);
  next.template find<kThreads>(head, queries_of_block);
  if (has_block_map) __syncthreads();
  next.begin();
  Queries queries = {shared_address(shared)};
  Tiles tiles = {queries.memory + (is_quantised<K> ? 0 : Queries::kBytes),
                 keys_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head),
                 values_of(FLASHATTN_STORED_INPUTS(K), params, batch, kv_head), threadIdx.x};
  RowLayout layout = row_layout(params.query);
  const T* head_queries = head_of(query, params, params.query, batch, head);
  AttendingRows<T, K, is_quantised<K> ? ROWS : kRows, D, DV, KEYS> rows;
  if constexpr (is_quantised<K>) {
    const auto row_at = [&](int row) { return head_queries + layout.offset(minimum(own_query + row, last_row), 0); };
    rows.read_queries(row_at, layout.column, lane);
  } else {
    queries.template load<kThreads>(head_queries + layout.offset(first_row, 0), layout, params.query_len - first_row,
                                    head_dim, threadIdx.x);
  }
  tiles.load(0, next.first(), next.any.end);
  commit_copies();

  rows.begin(visibility, own_query, head, 1, lane);
  if constexpr (is_quantised<K>) {
    rows.take_queries(lane);
  } else {
    rows.queries = own_rows(queries, own_row);
  }
  for (int n = 0; next.is_there(); ++n) {
    int first = next.first();
    bool is_needed = next.is_needed(), is_unmasked = next.is_unmasked();
    wait_for_copies<0>();
    __syncthreads();  // the tile has arrived, and all warps have read the previous tile
    next.next();
    tiles.load(n + 1, next.first(), next.any.end);
    commit_copies();
    if (is_needed) rows.template attend<PARTS>(tiles.keys(n), tiles.values(n), visibility, first, is_unmasked, lane);
  }
  wait_for_copies<0>();  // if there was no tile, the queries' copies may be unfinished
  rows.finish(visibility);
  uint not_finite = rows.store(FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, lane);
  attend_again(not_finite, FLASHATTN_ROW_OUTPUTS(T), query, FLASHATTN_STORED_INPUTS(K), visibility, sinks, batch, head,
               own_query, lane);
}
