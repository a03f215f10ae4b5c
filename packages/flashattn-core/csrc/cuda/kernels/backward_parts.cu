// Replaces backward.cu on compute capability 9.0 for float32, and for 16-bit arrays that are too wide for
// backward_hopper.cu. Each float32 array is split into three bfloat16 parts, see float_parts.h. Shared memory then has
// room for only 64 rows per block, so two consumer warpgroups share these rows.
// Warpgroup 0 computes S and P, and hands over P (with soft-cap, S). If the rows are keys, warpgroup 0 also sums dv.
// Warpgroup 1 takes P or S, computes dP and dS, and sums dq or dk. While one warpgroup computes P or dS, the other one
// uses the tensor cores.
// Tensor cores truncate long sums. So for float32 tensor cores sum over one tile, and ordinary instructions add up
// these sums.
#include "gradient_block.h"
#include "tile_ring.h"
#include "wgmma.h"

using namespace flashattn;

// The saved_rows of a tile whose columns are queries. If the columns are keys, this struct takes no memory.
template <int COLUMNS, bool OF_KEYS>
struct SavedTile {
  static constexpr int kBytes = OF_KEYS ? COLUMNS * int(sizeof(float4)) : 0;

  uint memory;
};

// Loads all column tiles of one array. One thread calls it.
template <typename Block, typename Ring>
FLASHATTN_FUNC void load_columns(const Block& block, Ring ring, const cuda::TensorMap& map) {
  auto tile = block.first_tile();
  for (int n = 0; block.is_there(tile); ++n, tile = block.next_tile(tile)) {
    ring.load(n, map, tile.column, Block::kOfKeys ? tile.head : block.kv_head, block.batch);
  }
}

// Starts to multiply the block's rows by tile n, one part of the tile after the other, see begin_multiply_keys().
template <int WIDTH, int N, typename Own, typename Ring>
FLASHATTN_FUNC void begin_multiply(Fragment (&scores)[N], Own own, Ring ring, int n) {
  begin_products();
  FLASHATTN_UNROLL
  for (int part = 0; part < Ring::kParts; ++part) {
    ring.wait_for_tile(n, part);
    begin_multiply_keys<WIDTH, Ring::kParts>(scores, own, 0, ring.tile(n, part), part);
  }
}

// sums += weights @ tile n, where the weights are fragments of P or dS, as PARTS 16-bit floats. Releases each part of
// the tile as soon as the tensor cores have read it. The producer can then load a part of the next tile.
template <typename E, int PARTS, int COUNT, int N, typename Ring>
FLASHATTN_FUNC void add_tile(Fragment (&sums)[N], const Fragment (&weights)[COUNT], Ring ring, int n) {
  uint parts[COUNT / 2][PARTS][4];
  FLASHATTN_UNROLL
  for (int i = 0; i < COUNT / 2; ++i) split_step<E>(weights, i, parts[i]);
  begin_products();
  if constexpr (Ring::kParts == 1) {
    ring.wait_for_tile(n);
    begin_add_values<1>(sums, parts, ring.tile(n));
    wait_for_products<0>(sums);
    ring.release(n);
  } else {
    Fragment of_tile[N];
    FLASHATTN_UNROLL
    for (int part = 0; part < 3; ++part) {
      ring.wait_for_tile(n, part);
      begin_add_values<3>(of_tile, parts, ring.tile(n, part), part, true);
    }
    wait_for_products<2>(of_tile);
    ring.release(n, 0, 1);
    wait_for_products<1>(of_tile);
    ring.release(n, 1, 2);
    wait_for_products<0>(of_tile);
    ring.release(n, 2);
    FLASHATTN_UNROLL
    for (int i = 0; i < 4 * N; ++i) sums[i / 4][i % 4] += of_tile[i / 4][i % 4];
  }
}

// Passes COUNT fragments per thread from one warpgroup to the thread of the same index in another warpgroup. Unless
// WAITS, hand_over() must not be called for the next tile before the other warpgroup has called take().
template <int COUNT, bool WAITS>
struct Handover {
  static constexpr int kBytes = COUNT * kWarpgroup * int(sizeof(Fragment));

  uint memory;
  Barrier given, taken;  // `taken` only if WAITS

  FLASHATTN_FUNC float4* fragment(int i) const {
    return static_cast<float4*>(shared_pointer(memory)) + i * kWarpgroup + threadIdx.x % kWarpgroup;
  }
  FLASHATTN_FUNC void hand_over(const Fragment (&from)[COUNT], int n) const {
    if (WAITS && n > 0) taken.wait(n - 1);
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) *fragment(i) = {from[i][0], from[i][1], from[i][2], from[i][3]};
    given.arrive();
  }
  FLASHATTN_FUNC void take(Fragment (&to)[COUNT], int n) const {
    given.wait(n);
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      float4 four = *fragment(i);
      to[i][0] = four.x, to[i][1] = four.y, to[i][2] = four.z, to[i][3] = four.w;
    }
    if (WAITS) taken.arrive();
  }
};

// D and DV: head_dim and value_dim, rounded up to 16 or, for float32, to whole panels. Sizes::first_stages and
// second_stages: the stages of the rings for first and second arrays, see gradient_block.h. A stage holds one part of a
// tile. Sizes::of: kDq or kDkAndDv. backward.cu describes the other sizes and the grid. A block has 64 rows.
template <typename T, typename Sizes>
FLASHATTN_KERNEL backward_parts(const cuda::BackwardArguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, COLUMNS = Sizes::columns;
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_BACKWARD_ARGUMENTS(T);
  using Element = typename Operand<T>::Element;
  constexpr int kParts = Operand<T>::kParts, kRows = kWarpgroupRows, kWarps = 4, kGroups = 2;
  constexpr bool kWaits =
      Sizes::first_stages >= 2 * kParts;  // otherwise S of the next tile waits until P has been taken
  static_assert(Sizes::consumer_registers * kGroups + Sizes::producer_registers <= 65536 / kWarpgroup,
                "more registers than there are");
  using Block = GradientBlock<T, Sizes, kRows, 1, Element>;
  using BlockOfFirst = GradientBlock<T, Sizes, kRows, 1, Element, kDv>;
  using BlockOfSecond = GradientBlock<T, Sizes, kRows, 1, Element, Block::kOfKeys ? kDk : kDq>;
  using OwnFirst = SharedTile<Element, kRows, D>;
  using OwnSecond = SharedTile<Element, kRows, DV>;
  using Firsts = TileRing<SharedTile<Element, COLUMNS, D>, Sizes::first_stages, kParts>;
  using Seconds = TileRing<SharedTile<Element, COLUMNS, DV>, Sizes::second_stages, kParts>;
  using SavedOfTile = SavedTile<COLUMNS, Block::kOfKeys>;
  using Saved = TileRing<SavedOfTile, 2>;
  using Scores = Handover<COLUMNS / 8, kWaits>;
  constexpr int kOwnBytes = kParts * (OwnFirst::kBytes + OwnSecond::kBytes);
  extern __shared__ __align__(1024) uchar shared[];
  OwnFirst own_first = {shared_address(shared)};
  OwnSecond own_second = {own_first.memory + kParts * OwnFirst::kBytes};
  uint first_memory = own_first.memory + kOwnBytes, second_memory = first_memory + Firsts::kBytes;
  uint saved_memory = second_memory + Seconds::kBytes, handed_memory = saved_memory + Saved::kBytes;
  Firsts firsts = {first_memory, handed_memory + Scores::kBytes};
  Seconds seconds = {second_memory, firsts.barriers + Firsts::kBarriers};
  Saved saved = {saved_memory, seconds.barriers + Seconds::kBarriers};
  Barrier own_arrived = {saved.barriers + Saved::kBarriers};
  Scores handed = {handed_memory, {own_arrived.address + kBarrierBytes}, {own_arrived.address + 2 * kBarrierBytes}};

  uint* tile_lists = static_cast<uint*>(shared_pointer(handed.given.address + (1 + kWaits) * kBarrierBytes));
  Block block(FLASHATTN_GRADIENT_BLOCK(T, tile_lists));
  int lane = lane_index(), warp = int(warp_index()), group = __shfl_sync(~0u, warp / kWarps, 0);
  if (threadIdx.x == 0) {
    firsts.initialise(kGroups * kWarps);
    seconds.initialise(Block::kFirst ? kGroups * kWarps : kWarps);
    saved.initialise(kGroups * kWarps);
    handed.given.initialise(kWarpgroup);
    if (kWaits) handed.taken.initialise(kWarpgroup);
    own_arrived.initialise(1);
    publish_barriers();
  }
  block.template find<(kGroups + 1) * kWarpgroup>();
  __syncthreads();

  if (group == kGroups) {
    leave_registers<Sizes::producer_registers>();
    const auto &of_first = Block::kOfKeys ? arguments.key_map : arguments.query_map,
               &of_second = Block::kOfKeys ? arguments.value_map : arguments.dout_map,
               &columns_first = Block::kOfKeys ? arguments.query_map : arguments.key_map,
               &columns_second = Block::kOfKeys ? arguments.dout_map : arguments.value_map;
    if (lane == 0 && warp % kWarps == 0) {
      int head = Block::kOfKeys ? block.kv_head : block.head;
      own_arrived.arrive_and_expect(kOwnBytes);
      load_boxes<kParts>(own_first, of_first, block.first_row, head, block.batch, own_arrived);
      load_boxes<kParts>(own_second, of_second, block.first_row, head, block.batch, own_arrived);
      load_columns(block, firsts, columns_first);
    } else if (lane == 0 && warp % kWarps == 1) {
      load_columns(block, seconds, columns_second);
    } else if (lane == 0 && warp % kWarps == 2 && Block::kOfKeys) {
      auto tile = block.first_tile();
      for (int n = 0; block.is_there(tile); ++n, tile = block.next_tile(tile)) {
        saved.expect(n);
        copy_bytes(saved.tile(n).memory, block.saved(tile.head) + tile.column, SavedOfTile::kBytes, saved.arrived(n));
      }
    }
    return;
  }
  take_registers<Sizes::consumer_registers>();

  int own_row = block.first_row + warp % kWarps * kWarpRows;
  auto rows = block.own_rows(own_row, lane);
  Fragment scores[COLUMNS / 8], none[1];
  own_arrived.wait(0);
  auto tile = block.first_tile();
#define FLASHATTN_TO_GRADIENTS(STEP, scores, dscores)                                                     \
  if (Block::kOfKeys) saved.wait_for_tile(n);                                                             \
  const float4* saved_columns = static_cast<const float4*>(shared_pointer(saved.tile(n).memory));         \
  block.take_columns(rows, saved_columns, lane);                                                          \
  block.template to_gradients<STEP>(scores, dscores, rows, own_row, saved_columns, tile, unmasked, lane); \
  if (Block::kOfKeys) saved.release(n)
  if (group == 0) {
    Fragment sums[Block::kFirst ? DV / 8 : 1] = {};
    for (int n = 0; block.is_there(tile); ++n, tile = block.next_tile(tile)) {
      bool unmasked = block.look(rows, 0, own_row, tile, lane);
      begin_multiply<head_dim>(scores, own_first, firsts, n);
      wait_for_products<0>(scores);
      firsts.release(n);
      if (has_softcap) handed.hand_over(scores, n);  // soft-cap's derivative needs the score
      FLASHATTN_TO_GRADIENTS(kToProbabilities, scores, scores);
      if (!has_softcap) handed.hand_over(scores, n);
      if constexpr (Block::kFirst) add_tile<Element, Sizes::parts>(sums, scores, seconds, n);
    }
    if constexpr (Block::kFirst) {
      BlockOfFirst(FLASHATTN_GRADIENT_BLOCK(T, tile_lists)).store(sums, none, rows.largest, own_row, lane);
    }
  } else {
    Fragment dscores[COLUMNS / 8], sums[D / 8] = {};
    for (int n = 0; block.is_there(tile); ++n, tile = block.next_tile(tile)) {
      bool unmasked = has_softcap ? block.look(rows, 0, own_row, tile, lane) : block.is_unmasked(tile, 0);
      begin_multiply<value_dim>(dscores, own_second, seconds, n);
      wait_for_products<0>(dscores);
      seconds.release(n);
      handed.take(scores, n);
      FLASHATTN_TO_GRADIENTS((has_softcap ? kBoth : kToGradients), scores, dscores);
      add_tile<Element, Sizes::parts>(sums, dscores, firsts, n);
    }
    BlockOfSecond(FLASHATTN_GRADIENT_BLOCK(T, tile_lists)).store(none, sums, rows.largest, own_row, lane);
  }
#undef FLASHATTN_TO_GRADIENTS
}
