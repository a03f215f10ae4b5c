// Replaces backward.cu for 16-bit floats on compute capability 9.0. A producer warpgroup loads tiles, and each consumer
// warpgroup computes 64 rows.
// Blocks that compute dk and dv compute dq, too. They leave dS in shared memory, multiply it by their keys, and add the
// products to the sums of dq in global memory. Blocks with fewer keys before them come first, so sums have the same
// bits in every run. Blocks take their numbers when they start, so a block waits only for blocks that have started. The
// blocks of neighbouring keys start with the same queries, the last ones, so that each is one tile behind another.
#include "dq_sums.h"
#include "tile_ring.h"
#include "wgmma.h"

using namespace flashattn;

// One stage of the pipeline: a tile of queries, of dout and of saved_rows. All sizes are multiples of 1,024 bytes, so
// swizzled tiles are aligned.
template <typename T, int COLUMNS, int D, int DV>
struct QueryTiles {
  using First = SharedTile<T, COLUMNS, D>;
  using Second = SharedTile<T, COLUMNS, DV>;
  static constexpr int kSavedBytes = COLUMNS * int(sizeof(float4));
  static constexpr int kBytes = First::kBytes + Second::kBytes + kSavedBytes;

  uint memory;

  FLASHATTN_FUNC First first() const { return First{memory}; }
  FLASHATTN_FUNC Second second() const { return Second{memory + First::kBytes}; }
  FLASHATTN_FUNC uint saved() const { return memory + First::kBytes + Second::kBytes; }
};

// Passes the tiles' products for dq from the consumers to the warps that add them to the sums. Several warps do this in
// turn, because a warp waits until its products have arrived. BYTES: the products of a tile. ROOM: for how many tiles
// there is room.
template <int BYTES, int ROOM>
struct Outbox {
  static constexpr int kSenders = 3, kBytes = ROOM * BYTES, kBarriers = (kSenders + ROOM) * kBarrierBytes;

  uint memory;
  uint barriers;

  FLASHATTN_FUNC uint tile(int n) const { return memory + n % ROOM * BYTES; }
  FLASHATTN_FUNC Barrier filled(int n) const { return Barrier{barriers + n % kSenders * kBarrierBytes}; }
  FLASHATTN_FUNC Barrier emptied(int n) const { return Barrier{barriers + (kSenders + n % ROOM) * kBarrierBytes}; }

  // One thread calls it. fillers: how many threads call fill() for each tile.
  FLASHATTN_FUNC void initialise(int fillers) const {
    for (int i = 0; i < kSenders; ++i) filled(i).initialise(fillers);
    for (int i = 0; i < ROOM; ++i) emptied(i).initialise(1);
  }
  // Puts a warpgroup's products for tile n at `bytes` bytes into the tile's room.
  FLASHATTN_FUNC void fill(const Fragment (&from)[8], int bytes, int n) const {
    if (n >= ROOM) emptied(n).wait(n / ROOM - 1);
    float4* to = static_cast<float4*>(shared_pointer(tile(n) + bytes)) + threadIdx.x % kWarpgroup;
    FLASHATTN_UNROLL
    for (int c = 0; c < 8; ++c) to[c * kWarpgroup] = {from[c][0], from[c][1], from[c][2], from[c][3]};
    publish_operands();
    filled(n).arrive();
  }
  // Adds the products to a tile's sums when it is this block's turn.
  template <typename Tile>
  FLASHATTN_FUNC void send(Tile to, int n, uint turn) const {
    filled(n).wait(n / kSenders);
    wait_for_turn(to.turn, turn);
    send_floats(to.sums, tile(n), BYTES, turn > 0);
    wait_until_read();
    emptied(n).arrive();
    wait_until_sent();
    pass_turn(to.turn, turn);
  }
};

// The position, see block_position(), of the block that is the `started`th to start. All `parts` blocks of at_once
// groups of heads start before those of the next groups, so that the groups' arrays stay in the L2 cache.
FLASHATTN_FUNC uint position_of(uint started, uint parts, uint at_once) {
  uint all = gridDim.x / parts, first = started / (at_once * parts) * at_once, count = minimum(at_once, all - first);
  uint rest = started - first * parts;
  return rest / count * all + first + rest % count;
}

// Rows 64 h to 64 h + 63 of a tile. A tile with more than 64 rows must have only one panel.
template <typename T, int ROWS, int COLUMNS>
FLASHATTN_FUNC SharedTile<T, 64, COLUMNS> half_of(SharedTile<T, ROWS, COLUMNS> tile, int h) {
  static_assert(ROWS == 64 || COLUMNS <= 64, "one panel");
  return {tile.memory + h * 64 * 128};
}

// D and DV: head_dim and value_dim, rounded up to 16. backward.cu describes the other constants and the grid, but here
// a block has CONSUMERS * 64 keys.
template <typename T, typename Sizes>
FLASHATTN_KERNEL backward_hopper(const cuda::BackwardArguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, CONSUMERS = Sizes::consumers, COLUMNS = Sizes::columns,
                STAGES = Sizes::stages, PARTS = Sizes::parts;
  constexpr bool IS_PART = Sizes::is_part;
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_BACKWARD_ARGUMENTS(T);
  FLASHATTN_WRITTEN(float, dq_sums);
  FLASHATTN_WRITTEN(uint, arrivals);
  constexpr int kRows = CONSUMERS * kWarpgroupRows, kConsumers = CONSUMERS * kWarpgroup, kHalves = COLUMNS / 64;
  constexpr int kLaunched = 65536 / Sizes::blocks / ((CONSUMERS + 1) * kWarpgroup) / 8 * 8;
  static_assert(Sizes::consumer_registers * CONSUMERS + Sizes::producer_registers <= kLaunched * (CONSUMERS + 1),
                "more registers than the block has");
  using Block = GradientBlock<T, kDkAndDv, kRows, CONSUMERS, COLUMNS, IS_PART>;
  using Keys = SharedTile<T, kRows, D>;
  using Values = SharedTile<T, kRows, DV>;
  using Queries = QueryTiles<T, COLUMNS, D, DV>;
  using Ring = TileRing<Queries, STAGES>;
  using DScores = SharedTile<T, kRows, COLUMNS>;
  using Dq = DqSums<COLUMNS, D>;
  constexpr int kPanels = Dq::kColumns / 64, kPieces = COLUMNS / 64 * kPanels;
  static_assert(kPieces <= CONSUMERS, "a consumer computes one piece of a tile's dq, or none");
  using DqOutbox = Outbox<kPieces * Dq::kPieceBytes, Sizes::room>;
  extern __shared__ __align__(1024) uchar shared[];
  Keys keys = {shared_address(shared)};
  Values values = {keys.memory + Keys::kBytes};
  DScores shared_dscores = {values.memory + Values::kBytes};
  uint outbox_memory = shared_dscores.memory + PARTS * DScores::kBytes, ring_memory = outbox_memory + DqOutbox::kBytes;
  Ring ring = {ring_memory, ring_memory + Ring::kBytes};
  Barrier own_arrived = {ring.barriers + Ring::kBarriers};
  DqOutbox outbox = {outbox_memory, own_arrived.address + kBarrierBytes};
  Dq dq_of_call = {dq_sums, arrivals};
  uint* number = static_cast<uint*>(shared_pointer(outbox.barriers + DqOutbox::kBarriers));

  int lane = lane_index(), warp = int(warp_index()), group = __shfl_sync(~0u, warp / 4, 0);
  if (threadIdx.x == 0) {
    ring.initialise(CONSUMERS * 4);
    own_arrived.initialise(1);
    outbox.initialise(kPieces * kWarpgroup);
    publish_barriers();
    uint parts = (params.key_len + kRows - 1) / kRows;
    *number = position_of(atomicAdd(dq_of_call.turns, 1u), parts, backward.block_groups);
  }
  __syncthreads();
  Block block(FLASHATTN_GRADIENT_BLOCK(T, number + 1), *number);
  block.template find<kConsumers + kWarpgroup>();
  __syncthreads();
  auto tile = block.first_tile();

  if (group == CONSUMERS) {
    leave_registers<Sizes::producer_registers>();
    if (threadIdx.x == kConsumers) {
      own_arrived.arrive_and_expect(Keys::kBytes + Values::kBytes);
      load_boxes(keys, arguments.key_map, block.first_row, block.kv_head, block.batch, own_arrived);
      load_boxes(values, arguments.value_map, block.first_row, block.kv_head, block.batch, own_arrived);
      for (int n = 0; block.is_there(tile); ++n, tile = block.next_tile(tile)) {
        Queries to = ring.tile(n);
        ring.expect(n);
        load_boxes(to.first(), arguments.query_map, tile.column, tile.head, block.batch, ring.arrived(n));
        load_boxes(to.second(), arguments.dout_map, tile.column, tile.head, block.batch, ring.arrived(n));
        copy_bytes(to.saved(), block.saved(tile.head) + tile.column, Queries::kSavedBytes, ring.arrived(n));
      }
    } else if (warp % 4 != 0) {
      for (int n = 0; block.is_there(tile); ++n, tile = block.next_tile(tile)) {
        if (n % DqOutbox::kSenders != warp % 4 - 1) continue;
        int turn = block.turn_of(tile, lane);
        if (lane == 0) outbox.send(dq_of_call.tile(params, block.batch, tile.head, tile.column), n, turn);
      }
    }
    return;
  }
  take_registers<Sizes::consumer_registers>();

  int group_row = group * kWarpgroupRows, warp_row = warp * kWarpRows, own_row = block.first_row + warp_row;
  auto rows = block.own_rows(own_row, lane);
  Fragment first_sums[DV / 8] = {}, second_sums[D / 8] = {};
  own_arrived.wait(0);
  for (int n = 0; block.is_there(tile); ++n, tile = block.next_tile(tile)) {
    ring.wait_for_tile(n);
    Queries queries = ring.tile(n);
    Fragment scores[kHalves][8], dscores[kHalves][8];
    uint dparts[kHalves][4][PARTS][4];
    bool unmasked = block.look(rows, group, own_row, tile, lane);
    FLASHATTN_UNROLL
    for (int h = 0; h < kHalves; ++h) {
      begin_products();
      begin_multiply_keys<head_dim>(scores[h], keys, group_row, half_of(queries.first(), h));
      begin_products();
      begin_multiply_keys<value_dim>(dscores[h], values, group_row, half_of(queries.second(), h));
    }
    const float4* saved_columns = static_cast<const float4*>(shared_pointer(queries.saved()));
    block.take_columns(rows, saved_columns, lane);
    meet_warps<kConsumers>();  // all have read the dS of the tile before
    uint of_row = shared_dscores.lane_offset(warp_row + lane % 16, lane / 16);
#define FLASHATTN_TO_GRADIENTS(STEP) \
  block.template to_gradients<STEP>(scores[h], dscores[h], rows, own_row, saved_columns, tile, unmasked, lane, h * 64)
    const auto compute_half = [&](int h) {
      uint parts[4][PARTS][4];
      const auto begin_dv = [&] {
        FLASHATTN_UNROLL
        for (int i = 0; i < 4; ++i) split_step<T>(scores[h], i, parts[i]);
        begin_products();
        begin_add_values<1>(first_sums, parts, half_of(queries.second(), h));
      };
      const auto wait_for = [&](Fragment(&result)[8], int under_way) {
        if (under_way == 0) wait_for_products<0>(result);
        if (under_way == 1) wait_for_products<1>(result);
        if (under_way == 2) wait_for_products<2>(result);
        if (under_way == 3) wait_for_products<3>(result);
      };
      // Products that stay under way: the later half's, and those that add the earlier half to the sums.
      int others = 2 * (kHalves - 1);
      // Where registers suffice, dv's product begins early, and dS is computed meanwhile.
      constexpr bool kEarly = kHalves == 1 && PARTS == 1 && !has_softcap;
      if constexpr (has_softcap) {
        wait_for(scores[h], others);
        wait_for(dscores[h], others);
        FLASHATTN_TO_GRADIENTS(kBoth);
      } else {
        wait_for(scores[h], others + 1);
        FLASHATTN_TO_GRADIENTS(kToProbabilities);
        if (kEarly) begin_dv();
        wait_for(dscores[h], others + kEarly);
        FLASHATTN_TO_GRADIENTS(kToGradients);
      }
      FLASHATTN_UNROLL
      for (int i = 0; i < 4; ++i) split_step<T>(dscores[h], i, dparts[h][i]);
      if (!kEarly) begin_dv();
      if (PARTS > 1) wait_for_products<0>(first_sums);  // frees registers
      FLASHATTN_UNROLL
      for (int i = 0; i < 4 * PARTS; ++i) {
        store_matrices(shared_dscores.piece_at(of_row, 0, 4 * h + i / PARTS) + i % PARTS * DScores::kBytes,
                       dparts[h][i / PARTS][i % PARTS]);
      }
    };
#undef FLASHATTN_TO_GRADIENTS
    compute_half(0);
    if constexpr (kHalves == 2) {
      begin_products();
      begin_add_values<1>(second_sums, dparts[0], half_of(queries.first(), 0));
      compute_half(1);
    }
    publish_operands();
    // A part of dk's product keeps the tensor cores busy until dS is in shared memory, the rest until dq's is there.
    constexpr int kLast = kHalves - 1, kBefore = kPieces < CONSUMERS ? 4 : 2;
    begin_products();
    begin_add_values<1, 0, kBefore>(second_sums, dparts[kLast], half_of(queries.first(), kLast));
    meet_warps<kConsumers>();
    if (kPieces < CONSUMERS) wait_for_products<0>(second_sums);
    if (kPieces == CONSUMERS || group < kPieces) {
      Fragment products[8];
      begin_products();
      begin_multiply_transposed<PARTS>(products, shared_dscores, group / kPanels, keys, group % kPanels);
      begin_add_values<1, kBefore>(second_sums, dparts[kLast], half_of(queries.first(), kLast));
      wait_for_products<1>(products);
      outbox.fill(products, group * Dq::kPieceBytes, n);
    }
    wait_for_products<0>(first_sums);
    wait_for_products<0>(second_sums);
    ring.release(n);
  }
  asm volatile("" : "+r"(lane));  // keeps the compiler from holding the lane's rows in registers during the loop
  block.store(first_sums, second_sums, rows.largest, own_row, lane);
}
