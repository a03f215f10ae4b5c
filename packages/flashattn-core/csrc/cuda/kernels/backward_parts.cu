// backward_hopper.cu for float32, whose arrays come in parts, see float_parts.h. They take so much shared memory that
// two arrays of a head_dim of 128 leave room for one warpgroup with rows. So the next tile's scores are begun before
// this one's dS are computed, and each part of a tile makes room for one of the next as soon as it has been read.
// Tensor cores truncate what they add to a sum: what a tile adds is summed by itself, and added outside.
#include "float_parts.h"
#include "gradient_block.h"
#include "tile_ring.h"
#include "wgmma.h"

using namespace flashattn;

// What is saved of a tile's queries, if these are the columns.
template <int COLUMNS, bool OF_KEYS>
struct SavedTile {
  static constexpr int kBytes = OF_KEYS ? COLUMNS * int(sizeof(float4)) : 0;

  uint memory;
};

// By one thread: all tiles of an array.
template <typename Block, typename Ring>
FLASHATTN_FUNC void bring_columns(const Block& block, Ring ring, const cuda::TensorMap& map) {
  auto tile = block.first_tile();
  for (int n = 0; n < block.count; ++n, tile = block.next_tile(tile)) {
    ring.bring(n, map, tile.column, Block::kOfKeys ? tile.head : block.kv_head, block.batch);
  }
}

// Begins scores = the warpgroup's rows, from `row` on, times these parts of tile n, as begin_multiply_keys() does.
template <int WIDTH, int N, typename Own, typename Ring>
FLASHATTN_FUNC void begin_multiply(Fragment (&scores)[N], Own own, int row, Ring ring, int n, int first = 0,
                                   int end = Ring::kParts) {
  FLASHATTN_UNROLL
  for (int part = first; part < end; ++part) {
    ring.wait_for_tile(n, part);
    begin_multiply_keys<WIDTH, Ring::kParts>(scores, own, row, ring.tile(n, part), part);
  }
}

// sums += P or dS, of so many fragments, times tile n, which the warp has read then.
template <typename E, int COUNT, int N, typename Ring>
FLASHATTN_FUNC void add_tile(Fragment (&sums)[N], const Fragment (&weights)[COUNT], Ring ring, int n, int lane) {
  constexpr int kParts = Ring::kParts;
  uint parts[COUNT / 2][kParts][4];
  Fragment of_tile[N];
  FLASHATTN_UNROLL
  for (int i = 0; i < COUNT / 2; ++i) split_step<E>(weights, i, parts[i]);
  begin_products();
  FLASHATTN_UNROLL
  for (int part = 0; part < kParts; ++part) {
    ring.wait_for_tile(n, part);
    begin_add_values<kParts>(of_tile, parts, ring.tile(n, part), part, true);
  }
  wait_for_products<kParts - 1>(of_tile);
  ring.release(n, lane, 0, 1);
  wait_for_products<0>(of_tile);
  ring.release(n, lane, 1);
  FLASHATTN_UNROLL
  for (int i = 0; i < 4 * N; ++i) sums[i / 4][i % 4] += of_tile[i / 4][i % 4];
}

// D and DV: head_dim and value_dim rounded up to whole panels. GROUPS: warpgroups with rows. COLUMNS: of a tile.
// FIRST_STAGES and SECOND_STAGES: parts of tiles that there is room for. REGISTERS and FEW: of a thread that computes
// and of one that loads. OF, IS_PART and blocks: as in backward.cu, with GROUPS * 64 rows.
template <typename T, int D, int DV, int GROUPS, int COLUMNS, int FIRST_STAGES, int SECOND_STAGES, int REGISTERS,
          int FEW, int OF, bool IS_PART>
FLASHATTN_KERNEL backward_parts(const cuda::BackwardArguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_BACKWARD_ARGUMENTS(T);
  using Element = typename Operand<T>::Element;
  constexpr int kParts = Operand<T>::kParts, kRows = GROUPS * kWarpgroupRows, kReaders = GROUPS * 4;
  constexpr int kLaunched = 65536 / ((GROUPS + 1) * kWarpgroup) / 8 * 8;
  static_assert(REGISTERS * GROUPS + FEW <= kLaunched * (GROUPS + 1), "more registers than the block has");
  using Block = GradientBlock<T, OF, kRows, COLUMNS, IS_PART, Element>;
  using OwnFirst = SharedTile<Element, kRows, D>;
  using OwnSecond = SharedTile<Element, kRows, DV>;
  using Firsts = TileRing<SharedTile<Element, COLUMNS, D>, FIRST_STAGES, kParts>;
  using Seconds = TileRing<SharedTile<Element, COLUMNS, DV>, SECOND_STAGES, kParts>;
  using SavedOfTile = SavedTile<COLUMNS, Block::kOfKeys>;
  using Saved = TileRing<SavedOfTile, 2>;
  constexpr int kOwnSecondBytes = Block::kSecond ? kParts * OwnSecond::kBytes : 0;  // dv alone does not need dP
  constexpr int kAhead = GROUPS == 1 ? FIRST_STAGES - kParts : 0;  // parts of the next tile; other warpgroups else
  extern __shared__ __align__(1024) uchar shared[];
  OwnFirst own_first = {shared_address(shared)};
  OwnSecond own_second = {own_first.memory + kParts * OwnFirst::kBytes};
  uint first_memory = own_second.memory + kOwnSecondBytes, second_memory = first_memory + Firsts::kBytes;
  uint saved_memory = second_memory + Seconds::kBytes, barriers = saved_memory + Saved::kBytes;
  Firsts firsts = {first_memory, barriers};
  Seconds seconds = {second_memory, firsts.barriers + Firsts::kBarriers};
  Saved saved = {saved_memory, seconds.barriers + Seconds::kBarriers};
  Barrier own_arrived = {saved.barriers + Saved::kBarriers};

  Block block(FLASHATTN_GRADIENT_BLOCK(T));
  int lane = lane_index(), warp = int(warp_index()), group = __shfl_sync(~0u, warp / 4, 0);
  if (threadIdx.x == 0) {
    firsts.initialise(kReaders);
    seconds.initialise(kReaders);
    saved.initialise(kReaders);
    own_arrived.initialise(1);
    publish_barriers();
  }
  __syncthreads();

  if (group == GROUPS) {
    leave_registers<FEW>();
    const auto &of_first = Block::kOfKeys ? arguments.key_map : arguments.query_map,
               &of_second = Block::kOfKeys ? arguments.value_map : arguments.dout_map,
               &columns_first = Block::kOfKeys ? arguments.query_map : arguments.key_map,
               &columns_second = Block::kOfKeys ? arguments.dout_map : arguments.value_map;
    if (lane == 0 && warp % 4 == 0) {
      int head = Block::kOfKeys ? block.kv_head : block.head;
      own_arrived.arrive_and_expect(kParts * OwnFirst::kBytes + kOwnSecondBytes);
      bring_boxes<kParts>(own_first, of_first, block.first_row, head, block.batch, own_arrived);
      if (Block::kSecond) bring_boxes<kParts>(own_second, of_second, block.first_row, head, block.batch, own_arrived);
      bring_columns(block, firsts, columns_first);
    } else if (lane == 0 && warp % 4 == 1) {
      bring_columns(block, seconds, columns_second);
    } else if (lane == 0 && warp % 4 == 2 && Block::kOfKeys) {
      auto tile = block.first_tile();
      for (int n = 0; n < block.count; ++n, tile = block.next_tile(tile)) {
        saved.expect(n);
        copy_bytes(saved.tile(n).memory, block.saved(tile.head) + tile.column, SavedOfTile::kBytes, saved.arrived(n));
      }
    }
    return;
  }
  take_registers<REGISTERS>();

  int group_row = group * kWarpgroupRows, first_of_group = block.first_row + group_row;
  int own_row = first_of_group + warp % 4 * kWarpRows;
  int last_of_group = minimum(first_of_group + kWarpgroupRows - 1, block.last_row);
  KeySpan own_any = first_of_group <= last_of_group ? block.columns_of(first_of_group, last_of_group) : KeySpan{0, 0};
  auto queries = block.own_queries(own_row, lane);
  Fragment first_sums[Block::kFirst ? DV / 8 : 1] = {}, second_sums[Block::kSecond ? D / 8 : 1] = {};
  Fragment scores[COLUMNS / 8], dscores[COLUMNS / 8], ahead[COLUMNS / 8];
  const auto begin_ahead = [&](int n) {
    begin_products();
    FLASHATTN_UNROLL
    for (int part = 0; part < kAhead; ++part) {
      if (n < block.count) {
        begin_multiply<head_dim>(ahead, own_first, group_row, firsts, n, part, part + 1);
      } else {
        commit_products();  // as many groups are under way
      }
    }
  };
  own_arrived.wait(0);
  begin_ahead(0);
  wait_for_products<0>(ahead);
  auto tile = block.first_tile();
  for (int n = 0; n < block.count; ++n, tile = block.next_tile(tile)) {
    if (GROUPS > 1 && !own_any.meets(tile.column, COLUMNS)) {
      firsts.pass(n, lane);
      seconds.pass(n, lane);
      if (Block::kOfKeys) saved.pass(n, lane);
      continue;
    }
    FLASHATTN_UNROLL
    for (int i = 0; i < COLUMNS / 2 && kAhead > 0; ++i) scores[i / 4][i % 4] = ahead[i / 4][i % 4];
    begin_products();
    begin_multiply<head_dim>(scores, own_first, group_row, firsts, n, kAhead);
    if constexpr (Block::kSecond) begin_multiply<value_dim>(dscores, own_second, group_row, seconds, n);
    if (Block::kOfKeys) saved.wait_for_tile(n);
    const float4* saved_columns = static_cast<const float4*>(shared_pointer(saved.tile(n).memory));
    bool shown = block.all_see(first_of_group, kWarpgroupRows, tile.column);
#define FLASHATTN_TO_GRADIENTS(STEP) \
  block.template to_gradients<STEP>(scores, dscores, queries, own_row, saved_columns, tile, shown, lane)
    constexpr bool kAtOnce = Block::kSecond && has_softcap;
    wait_for_products<Block::kSecond && !kAtOnce ? kParts : 0>(scores);
    if (!Block::kSecond) firsts.release(n, lane);
    if constexpr (!kAtOnce) FLASHATTN_TO_GRADIENTS(kToProbabilities);
    begin_ahead(n + 1);
    if constexpr (Block::kSecond) {
      wait_for_products<kAhead>(dscores);
      FLASHATTN_TO_GRADIENTS((kAtOnce ? kBoth : kToGradients));
    }
#undef FLASHATTN_TO_GRADIENTS
    if (!Block::kFirst) seconds.release(n, lane);
    if (Block::kOfKeys) saved.release(n, lane);
    if constexpr (Block::kFirst) add_tile<Element>(first_sums, scores, seconds, n, lane);
    if constexpr (Block::kSecond) add_tile<Element>(second_sums, dscores, firsts, n, lane);
    wait_for_products<0>(ahead);
  }
  block.store(first_sums, second_sums, own_row, lane);
}
