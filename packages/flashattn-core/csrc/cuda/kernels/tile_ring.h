// Tiles that one warpgroup brings and others use. Barriers say what has arrived and what has been read.
#pragma once

#include "ptx_hopper.h"
#include "shared_tile.h"

namespace flashattn {

// One thread brings all panels of a tile, from `row` on; zeros for what is outside of the array.
template <typename Tile>
FLASHATTN_FUNC void bring_boxes(Tile tile, const cuda::TensorMap& map, int row, int head, int batch, Barrier arrived) {
  FLASHATTN_UNROLL
  for (int panel = 0; panel < Tile::kBytes / Tile::kPanel; ++panel) {
    copy_box(tile.memory + panel * Tile::kPanel, map, panel * 64, row, head, batch, arrived);
  }
}

// STAGES tiles in turn. Tile n is the n-th that the block sees.
template <typename Tile, int STAGES>
struct TileRing {
  static constexpr int kBytes = STAGES * Tile::kBytes, kBarriers = 2 * STAGES * kBarrierBytes;

  uint memory;
  uint barriers;

  FLASHATTN_FUNC Tile tile(int n) const { return Tile{memory + n % STAGES * Tile::kBytes}; }
  FLASHATTN_FUNC Barrier arrived(int n) const { return Barrier{barriers + n % STAGES * 2 * kBarrierBytes}; }
  FLASHATTN_FUNC Barrier read(int n) const { return Barrier{arrived(n).address + kBarrierBytes}; }

  // By one thread. readers: warps that read a tile.
  FLASHATTN_FUNC void initialise(int readers) const {
    for (int n = 0; n < STAGES; ++n) {
      arrived(n).initialise(1);
      read(n).initialise(readers);
    }
  }
  // By one thread, for each tile in turn.
  FLASHATTN_FUNC void bring(int n, const cuda::TensorMap& map, int row, int head, int batch) const {
    if (n >= STAGES) read(n).wait(n / STAGES - 1);
    arrived(n).arrive_and_expect(Tile::kBytes);
    bring_boxes(tile(n), map, row, head, batch, arrived(n));
  }
  FLASHATTN_FUNC void wait_for_tile(int n) const { arrived(n).wait(n / STAGES); }
  // The warp has read the tile.
  FLASHATTN_FUNC void release(int n, int lane) const {
    __syncwarp();
    if (lane == 0) read(n).arrive();
  }
};

}  // namespace flashattn
