// cuda_prefill_hopper: cuda_prefill for 16-bit floats on compute capability 9.0. One warpgroup brings the tiles, the
// others have 64 rows each. The scores of the next tile are begun before the product of this one with its values, so
// that the softmax runs while the tensor cores work.
#include "kernel.h"
#include "stored_rows.h"
#include "tile_ring.h"
#include "warp_rows.h"
#include "wgmma.h"

using namespace flashattn;

// D and DV: head_dim and value_dim rounded up to whole panels. GROUPS: warpgroups with rows. KEYS: of a tile. BLOCKS:
// to run at once. REGISTERS and FEW: of a thread that computes and of one that loads. PARTS: of probabilities. Blocks:
// heads and batch elements for each GROUPS * 64 queries.
template <typename T, int D, int DV, int GROUPS, int KEYS, int STAGES, int BLOCKS, int REGISTERS, int FEW, int PARTS>
FLASHATTN_KERNEL prefill_hopper(const cuda::BoxArguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_OUTPUT_ARGUMENTS(T);
  constexpr int kRows = GROUPS * kWarpgroupRows, kReaders = GROUPS * 4;
  constexpr int kLaunched = 65536 / BLOCKS / ((GROUPS + 1) * kWarpgroup) / 8 * 8;
  static_assert(REGISTERS * GROUPS + FEW <= kLaunched * (GROUPS + 1), "more registers than the block has");
  static_assert(STAGES >= 2, "the next keys are asked for before these values have been read");
  using Queries = SharedTile<T, kRows, D>;
  using Keys = SharedTile<T, KEYS, D>;
  using Values = SharedTile<T, KEYS, DV>;
  using KeyRing = TileRing<Keys, STAGES>;
  using ValueRing = TileRing<Values, STAGES>;
  extern __shared__ __align__(1024) uchar shared[];
  Queries queries = {shared_address(shared)};
  uint key_memory = queries.memory + Queries::kBytes, value_memory = key_memory + KeyRing::kBytes;
  uint barriers = value_memory + ValueRing::kBytes;
  KeyRing keys = {key_memory, barriers};
  ValueRing values = {value_memory, barriers + KeyRing::kBarriers};
  Barrier queries_arrived = {values.barriers + ValueRing::kBarriers};

  BlockPosition block = block_position(params, params.num_heads);
  int batch = block.batch, head = block.head, kv_head = head / (params.num_heads / params.num_kv_heads);
  int first_row = first_query(params, block.part, kRows), last_row = minimum(first_row + kRows, params.query_len) - 1;
  int lane = lane_index(), group = __shfl_sync(~0u, int(warp_index()) / 4, 0);

  // The block sees tiles 0 to tile_count - 1.
  Visibility visibility = visibility_of(params, FLASHATTN_MASK_INPUTS, batch);
  KeySpan any = visibility.seen_by_any(first_row, last_row);
  int origin = any.begin / KEYS * KEYS;
  int tile_count = any.begin < any.end ? (any.end - origin + KEYS - 1) / KEYS : 0;

  if (threadIdx.x == 0) {
    keys.initialise(kReaders);
    values.initialise(kReaders);
    queries_arrived.initialise(1);
    publish_barriers();
  }
  __syncthreads();

  if (group == GROUPS) {
    leave_registers<FEW>();
    if (threadIdx.x % kWarpgroup == 0) {
      queries_arrived.arrive_and_expect(Queries::kBytes);
      bring_boxes(queries, arguments.query_map, first_row, head, batch, queries_arrived);
      for (int n = 0; n <= tile_count; ++n) {
        if (n < tile_count) keys.bring(n, arguments.key_map, origin + n * KEYS, kv_head, batch);
        if (n > 0) values.bring(n - 1, arguments.value_map, origin + (n - 1) * KEYS, kv_head, batch);
      }
    }
    return;
  }
  take_registers<REGISTERS>();

  // The warpgroup's rows see tiles own_first to own_end - 1 of them.
  int group_query = first_row + group * kWarpgroupRows;
  int group_last = minimum(group_query + kWarpgroupRows - 1, last_row);
  KeySpan own_any = group_query <= group_last ? visibility.seen_by_any(group_query, group_last) : KeySpan{0, 0};
  KeySpan own_all = group_query <= group_last ? visibility.seen_by_all(group_query, group_last) : KeySpan{0, 0};
  bool sees = own_any.begin < own_any.end;
  int own_first = sees ? (own_any.begin - origin) / KEYS : 0;
  int own_end = sees ? (own_any.end - origin + KEYS - 1) / KEYS : 0;
  const auto first_key = [&](int n) { return origin + n * KEYS; };

  WarpRows<T, DV, KEYS> rows;
  int own_query = group_query + int(warp_index()) % 4 * kWarpRows;
  rows.begin(visibility, own_query, head, 1, lane);
  const auto pass = [&](int n) {  // a tile that the warpgroup does not see
    keys.wait_for_tile(n);
    keys.release(n, lane);
    values.wait_for_tile(n);
    values.release(n, lane);
  };
  queries_arrived.wait(0);
  int n = 0;
  for (; n < own_first; ++n) pass(n);
  if (sees) {
    Fragment scores[KEYS / 8];
    uint large[KEYS / 16][4], small[KEYS / 16][4];  // parts of the probabilities
    const auto split = [&] {
      FLASHATTN_UNROLL
      for (int i = 0; i < KEYS / 16; ++i) split_step<T>(scores, i, large[i], small[i]);
    };
    keys.wait_for_tile(n);
    begin_products();
    begin_multiply_keys(scores, queries, group * kWarpgroupRows, keys.tile(n));
    wait_for_products<0>(scores);
    keys.release(n, lane);
    rows.to_probabilities(scores, visibility, first_key(n), own_all.contains(first_key(n), KEYS), lane);
    split();
    for (; n < own_end - 1; ++n) {
      keys.wait_for_tile(n + 1);
      begin_products();
      begin_multiply_keys(scores, queries, group * kWarpgroupRows, keys.tile(n + 1));
      values.wait_for_tile(n);
      begin_add_values<PARTS>(rows.output, large, small, values.tile(n));
      wait_for_products<1>(scores);
      keys.release(n + 1, lane);
      bool shown = own_all.contains(first_key(n + 1), KEYS);
      Rescaling rescaling = rows.to_probabilities(scores, visibility, first_key(n + 1), shown, lane);
      wait_for_products<0>(rows.output);
      values.release(n, lane);
      split();
      rows.rescale(rescaling);
    }
    values.wait_for_tile(n);
    begin_products();
    begin_add_values<PARTS>(rows.output, large, small, values.tile(n));
    wait_for_products<0>(rows.output);
    values.release(n, lane);
    ++n;
  }
  for (; n < tile_count; ++n) pass(n);
  uint spoilt = rows.store(FLASHATTN_ROW_OUTPUTS(T), params, sinks, batch, lane);
  attend_again(spoilt, FLASHATTN_ROW_OUTPUTS(T), query, FLASHATTN_STORED_INPUTS(T), visibility, sinks, batch, head,
               own_query, lane);
}
