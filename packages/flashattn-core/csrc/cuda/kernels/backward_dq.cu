// Rounds the sums of dq that backward_hopper.cu leaves, and sets their turns back to 0.
#include "dq_sums.h"

using namespace flashattn;

// The grid has one block for each tile of QUERIES queries. A warp has 16 of them.
template <typename T, typename Sizes>
FLASHATTN_KERNEL backward_dq(const cuda::BackwardArguments& arguments) {
  constexpr int D = Sizes::dim, QUERIES = Sizes::queries;
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_BACKWARD_ARGUMENTS(T);
  FLASHATTN_WRITTEN(float, dq_sums);
  FLASHATTN_WRITTEN(uint, arrivals);
  GradientBlock<T, kDq, QUERIES, 1, 64, false> block(FLASHATTN_GRADIENT_BLOCK(T, nullptr));
  DqSums<QUERIES, D> sums = {dq_sums, arrivals};
  auto tile = sums.tile(params, block.batch, block.head, block.first_row);
  bool any = *tile.turn != 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    *tile.turn = 0;
    if (blockIdx.x == 0) *sums.turns = 0;
  }
  int lane = lane_index(), warp = int(warp_index()), own_row = block.first_row + warp * kWarpRows;
  const float4* from = reinterpret_cast<const float4*>(tile.sums) + warp / 4 * 16 * sums.kColumns;
  Fragment none[1], of_rows[D / 8] = {};
  FLASHATTN_UNROLL
  for (int c = 0; c < D / 8 && any; ++c) {
    float4 four = from[c * 128 + threadIdx.x % 128];
    of_rows[c][0] = four.x, of_rows[c][1] = four.y, of_rows[c][2] = four.z, of_rows[c][3] = four.w;
  }
  block.store(none, of_rows, block.own_rows(own_row, lane).largest, own_row, lane);
}
