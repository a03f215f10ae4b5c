// Replaces backward.cu for 16-bit floats on compute capability 9.0, up to head_dim 128. A producer warpgroup loads
// tiles, and each consumer warpgroup computes 64 rows.
#include "gradient_block.h"
#include "tile_ring.h"
#include "wgmma.h"

using namespace flashattn;

// One stage of the pipeline. It holds a tile of each column array (queries and dout, or keys and values) and, if the
// columns are queries, their saved_rows. All sizes are multiples of 1,024 bytes, so swizzled tiles are aligned.
template <typename T, int COLUMNS, int D, int DV, bool OF_KEYS>
struct ColumnTiles {
  using First = SharedTile<T, COLUMNS, D>;
  using Second = SharedTile<T, COLUMNS, DV>;
  static constexpr int kSavedBytes = OF_KEYS ? COLUMNS * int(sizeof(float4)) : 0;
  static constexpr int kBytes = First::kBytes + Second::kBytes + kSavedBytes;

  uint memory;

  FLASHATTN_FUNC First first() const { return First{memory}; }
  FLASHATTN_FUNC Second second() const { return Second{memory + First::kBytes}; }
  FLASHATTN_FUNC uint saved() const { return memory + First::kBytes + Second::kBytes; }
};

// Ping-pong scheduling: while one consumer uses the tensor cores, another one computes P and dS. In its turn on the
// tensor cores, a consumer adds its tile's products to the sums and starts S and dP of its next tile. GROUPS: the
// number of consumers. A single consumer never waits for a turn.
template <int GROUPS>
struct PingPong {
  static constexpr int kBarriers = GROUPS > 1 ? GROUPS* kBarrierBytes : 0;

  uint barriers;
  int group;

  FLASHATTN_FUNC Barrier turn_of(int group) const { return Barrier{barriers + group * kBarrierBytes}; }
  FLASHATTN_FUNC void initialise() const {
    for (int i = 0; GROUPS > 1 && i < GROUPS; ++i) turn_of(i).initialise(4);
  }
  FLASHATTN_FUNC void take(int n) const {
    if (GROUPS > 1 && (n > 0 || group > 0)) turn_of(group).wait(group > 0 ? n : n - 1);
  }
  FLASHATTN_FUNC void pass(int lane) const {
    if (GROUPS == 1) return;
    __syncwarp();
    if (lane == 0) turn_of((group + 1) % GROUPS).arrive();
  }
};

// D and DV: head_dim and value_dim, rounded up to 16. backward.cu describes the other constants and the grid, but here
// a block has CONSUMERS * 64 rows.
template <typename T, typename Sizes>
FLASHATTN_KERNEL backward_hopper(const cuda::BackwardArguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, CONSUMERS = Sizes::consumers, COLUMNS = Sizes::columns;
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_BACKWARD_ARGUMENTS(T);
  constexpr int kRows = CONSUMERS * kWarpgroupRows, kReaders = CONSUMERS * 4;
  constexpr int kLaunched = 65536 / Sizes::blocks / ((CONSUMERS + 1) * kWarpgroup) / 8 * 8;
  static_assert(Sizes::consumer_registers * CONSUMERS + Sizes::producer_registers <= kLaunched * (CONSUMERS + 1),
                "more registers than the block has");
  using Block = GradientBlock<T, Sizes, kRows, CONSUMERS>;
  using OwnFirst = SharedTile<T, kRows, D>;
  using OwnSecond = SharedTile<T, kRows, DV>;
  using Columns = ColumnTiles<T, COLUMNS, D, DV, Block::kOfKeys>;
  using Ring = TileRing<Columns, Sizes::stages>;
  extern __shared__ __align__(1024) uchar shared[];
  OwnFirst own_first = {shared_address(shared)};
  OwnSecond own_second = {own_first.memory + OwnFirst::kBytes};
  uint ring_memory = own_second.memory + OwnSecond::kBytes;
  Ring ring = {ring_memory, ring_memory + Ring::kBytes};
  Barrier own_arrived = {ring.barriers + Ring::kBarriers};

  int lane = lane_index(), warp = int(warp_index()), group = __shfl_sync(~0u, warp / 4, 0);
  // For dq there is no ping-pong, because its consumers were faster without it.
  PingPong<Block::kOfKeys ? CONSUMERS : 1> ping_pong = {own_arrived.address + kBarrierBytes, group};
  Block block(
      FLASHATTN_GRADIENT_BLOCK(T, static_cast<uint*>(shared_pointer(ping_pong.barriers + ping_pong.kBarriers))));
  if (threadIdx.x == 0) {
    ring.initialise(kReaders);
    own_arrived.initialise(1);
    ping_pong.initialise();
    publish_barriers();
  }
  block.template find<(CONSUMERS + 1) * kWarpgroup>();
  __syncthreads();

  if (group == CONSUMERS) {
    leave_registers<Sizes::producer_registers>();
    if (threadIdx.x % kWarpgroup == 0) {
      const auto &of_first = Block::kOfKeys ? arguments.key_map : arguments.query_map,
                 &of_second = Block::kOfKeys ? arguments.value_map : arguments.dout_map,
                 &columns_first = Block::kOfKeys ? arguments.query_map : arguments.key_map,
                 &columns_second = Block::kOfKeys ? arguments.dout_map : arguments.value_map;
      int own_head = Block::kOfKeys ? block.kv_head : block.head;
      own_arrived.arrive_and_expect(OwnFirst::kBytes + OwnSecond::kBytes);
      load_boxes(own_first, of_first, block.first_row, own_head, block.batch, own_arrived);
      load_boxes(own_second, of_second, block.first_row, own_head, block.batch, own_arrived);
      auto tile = block.first_tile();
      for (int n = 0; block.is_there(tile); ++n, tile = block.next_tile(tile)) {
        int first = tile.column, head = Block::kOfKeys ? tile.head : block.kv_head;
        Columns to = ring.tile(n);
        ring.expect(n);
        load_boxes(to.first(), columns_first, first, head, block.batch, ring.arrived(n));
        load_boxes(to.second(), columns_second, first, head, block.batch, ring.arrived(n));
        if (Block::kOfKeys) copy_bytes(to.saved(), block.saved(head) + first, Columns::kSavedBytes, ring.arrived(n));
      }
    }
    return;
  }
  take_registers<Sizes::consumer_registers>();

  int group_row = group * kWarpgroupRows, first_of_group = block.first_row + group_row;
  int own_row = first_of_group + warp % 4 * kWarpRows;
  int last_of_group = minimum(first_of_group + kWarpgroupRows - 1, block.last_row);
  KeySpan own_any = first_of_group <= last_of_group ? block.columns_of(first_of_group, last_of_group) : KeySpan{0, 0};
  auto rows = block.own_rows(own_row, lane);
  Fragment first_sums[Block::kFirst ? DV / 8 : 1] = {}, second_sums[D / 8] = {};
  own_arrived.wait(0);
  auto tile = block.first_tile();
  int n = 0;
  for (auto next = tile; block.is_there(tile); ++n, tile = next) {
    next = block.next_tile(tile);  // called early, because reading the block's list of tiles takes time
    ring.wait_for_tile(n);
    if (block.is_needed(tile, group, own_any)) {
      Columns columns = ring.tile(n);
      Fragment scores[COLUMNS / 8], dscores[COLUMNS / 8];
      uint parts[COLUMNS / 16][Sizes::parts][4], dparts[COLUMNS / 16][Sizes::parts][4];
      bool unmasked = block.look(rows, group, own_row, tile, lane);
      begin_products();
      begin_multiply_keys<head_dim>(scores, own_first, group_row, columns.first());
      begin_multiply_keys<value_dim>(dscores, own_second, group_row, columns.second());
      const float4* saved_columns = static_cast<const float4*>(shared_pointer(columns.saved()));
      block.take_columns(rows, saved_columns, lane);
      if (n > 0) ping_pong.pass(lane);
#define FLASHATTN_TO_GRADIENTS(STEP) \
  block.template to_gradients<STEP>(scores, dscores, rows, own_row, saved_columns, tile, unmasked, lane)
      if constexpr (has_softcap) {
        wait_for_products<0>(scores);
        wait_for_products<0>(dscores);
        FLASHATTN_TO_GRADIENTS(kBoth);
      } else {
        wait_for_products<1>(scores);
        FLASHATTN_TO_GRADIENTS(kToProbabilities);
        wait_for_products<0>(dscores);
        FLASHATTN_TO_GRADIENTS(kToGradients);
      }
#undef FLASHATTN_TO_GRADIENTS
      FLASHATTN_UNROLL
      for (int i = 0; i < COLUMNS / 16; ++i) {
        if (Block::kFirst) split_step<T>(scores, i, parts[i]);
        split_step<T>(dscores, i, dparts[i]);
      }
      ping_pong.take(n);
      begin_products();
      if constexpr (Block::kFirst) begin_add_values<1>(first_sums, parts, columns.second());
      begin_add_values<1>(second_sums, dparts, columns.first());
      wait_for_products<0>(first_sums);
      wait_for_products<0>(second_sums);
    } else {
      if (n > 0) ping_pong.pass(lane);
      ping_pong.take(n);
    }
    ring.release(n);
  }
  if (n > 0) ping_pong.pass(lane);
  block.store(first_sums, second_sums, rows.largest, own_row, lane);
}
