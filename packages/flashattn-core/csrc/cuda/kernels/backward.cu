// The kernel of cuda_backward_dq and cuda_backward_dkv, see gradient_block.h.
#include "gradient_block.h"

using namespace flashattn;

// D and DV: head_dim and value_dim, rounded up to whole steps of the tensor cores. Sizes::parts: how many 16-bit floats
// represent an element of P or dS. GradientBlock describes Sizes::of, COLUMNS and Sizes::is_part. For dq, each head and
// batch element has one block per WARPS * 16 queries. For dk and dv, each key/value head and batch element has
// head_chunks() blocks per WARPS * 16 keys.
template <typename T, typename Sizes>
FLASHATTN_KERNEL backward(const cuda::BackwardArguments& arguments) {
  constexpr int D = Sizes::dim, DV = Sizes::value_dim, WARPS = Sizes::warps, COLUMNS = Sizes::columns;
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_BACKWARD_ARGUMENTS(T);
  constexpr int kRows = WARPS * kWarpRows, kThreads = WARPS * FLASHATTN_LANES;
  using Own = CopiedTiles<T, kRows, D, DV, 1, kThreads>;
  using Tiles = CopiedTiles<T, COLUMNS, D, DV, 2, kThreads>;
  using Block = GradientBlock<T, Sizes, kRows, WARPS>;
  extern __shared__ __align__(1024) uchar shared[];

  float4* saved_columns = reinterpret_cast<float4*>(shared + Own::kBytes + Tiles::kBytes);  // for two tiles
  Block block(FLASHATTN_GRADIENT_BLOCK(T, reinterpret_cast<uint*>(saved_columns + 2 * COLUMNS)));
  block.template find<kThreads>();
  if (has_block_map) __syncthreads();
  int lane = lane_index(), warp = warp_index(), warp_row = warp * kWarpRows, own_row = block.first_row + warp_row;
  KeySpan own_any = block.columns_of(own_row, minimum(own_row + kWarpRows - 1, block.last_row));

  Own own = {shared_address(shared), block.own_first(block.head), block.own_second(block.head), threadIdx.x};
  own.load(0, block.first_row, block.last_row + 1);
  const auto tiles_of = [&](int head) {
    return Tiles{own.memory + Own::kBytes, block.columns_first(head), block.columns_second(head), threadIdx.x};
  };
  auto next = block.first_tile();
  const auto load_next = [&](int n) {
    if (block.is_there(next)) {
      tiles_of(next.head).load(n, next.column, block.any.end);
      if (Block::kOfKeys && threadIdx.x < COLUMNS) {
        copy_async(shared_address(saved_columns + n % 2 * COLUMNS + threadIdx.x),
                   block.saved(next.head) + next.column + threadIdx.x, sizeof(float4));
      }
    }
    commit_copies();
  };
  load_next(0);
  auto rows = block.own_rows(own_row, lane);
  Fragment first_sums[Block::kFirst ? DV / 8 : 1] = {}, second_sums[Block::kSecond ? D / 8 : 1] = {};
  for (int n = 0; block.is_there(next); ++n) {
    wait_for_copies<0>();
    __syncthreads();  // the tile has arrived, and all warps have read the previous tile
    auto tile = next;
    next = block.next_tile(tile);
    load_next(n + 1);
    if (!block.is_needed(tile, warp, own_any)) continue;
    Tiles tiles = tiles_of(tile.head);
    bool unmasked = block.look(rows, warp, own_row, tile, lane);
    Fragment scores[COLUMNS / 8] = {}, dscores[COLUMNS / 8] = {};
    multiply_keys(scores, own_rows(own.keys(0), warp_row), tiles.keys(n), lane);
    if (Block::kSecond) multiply_keys(dscores, own_rows(own.values(0), warp_row), tiles.values(n), lane);
    block.take_columns(rows, saved_columns + n % 2 * COLUMNS, lane);
    block.template to_gradients<kBoth>(scores, dscores, rows, own_row, saved_columns + n % 2 * COLUMNS, tile, unmasked,
                                       lane);
    if constexpr (Block::kFirst) add_values<Sizes::parts>(first_sums, scores, tiles.values(n), lane);
    if constexpr (Block::kSecond) add_values<Sizes::parts>(second_sums, dscores, tiles.keys(n), lane);
  }
  wait_for_copies<0>();  // if there was no tile, the copies of the block's own rows may be unfinished
  block.store(first_sums, second_sums, rows.largest, own_row, lane);
}
