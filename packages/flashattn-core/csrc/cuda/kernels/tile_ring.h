// A ring buffer of tiles that a producer loads and consumers read. Barriers tell when a tile has arrived, and when all
// consumers have read it.
#pragma once

#include "ptx_hopper.h"
#include "shared_tile.h"

namespace flashattn {

// Loads all panels of a tile, from `row` on, with zeros outside of the array. If the array is split into PARTS parts
// (see float_parts.h), loads the tiles of all parts, one after the other. One thread must call it.
template <int PARTS = 1, typename Tile>
FLASHATTN_FUNC void load_boxes(Tile tile, const cuda::TensorMap& map, int row, int head, int batch, Barrier arrived) {
  constexpr int kPanels = Tile::kBytes / Tile::kPanel;
  FLASHATTN_UNROLL
  for (int panel = 0; panel < PARTS * kPanels; ++panel) {
    copy_box(tile.memory + panel * Tile::kPanel, map, panel % kPanels * 64, row, head, batch * PARTS + panel / kPanels,
             arrived);
  }
}

// A ring of STAGES stages. A tile has PARTS parts, and each part takes one stage. n: the index of a tile in the block's
// loop. turn: the index of a part among the parts of all tiles, n * PARTS + part.
template <typename Tile, int STAGES, int PARTS = 1>
struct TileRing {
  static constexpr int kParts = PARTS;
  static constexpr int kBytes = STAGES * Tile::kBytes, kBarriers = 2 * STAGES * kBarrierBytes;

  uint memory;
  uint barriers;

  FLASHATTN_FUNC Tile tile(int n, int part = 0) const {
    return Tile{memory + (n * PARTS + part) % STAGES * Tile::kBytes};
  }
  FLASHATTN_FUNC Barrier arrived(int turn) const { return Barrier{barriers + turn % STAGES * 2 * kBarrierBytes}; }
  FLASHATTN_FUNC Barrier read(int turn) const { return Barrier{arrived(turn).address + kBarrierBytes}; }

  // One thread must call it. readers: how many warps read each tile. All threads of these warps arrive at the barrier
  // read(). One thread per warp would be enough, but compute-sanitizer's racecheck does not understand that.
  FLASHATTN_FUNC void initialise(int readers) const {
    for (int n = 0; n < STAGES; ++n) {
      arrived(n).initialise(1);
      read(n).initialise(readers * FLASHATTN_LANES);
    }
  }
  // Waits until the stage is free, then tells the stage's barrier how many bytes will arrive. The loading thread calls
  // it for each part of each tile, in order, before it loads the part.
  FLASHATTN_FUNC void expect(int n, int part = 0) const {
    int turn = n * PARTS + part;
    if (turn >= STAGES) read(turn).wait(turn / STAGES - 1);
    arrived(turn).arrive_and_expect(Tile::kBytes);
  }
  FLASHATTN_FUNC void load(int n, const cuda::TensorMap& map, int row, int head, int batch) const {
    FLASHATTN_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      expect(n, part);
      load_boxes(tile(n, part), map, row, head, batch * PARTS + part, arrived(n * PARTS + part));
    }
  }
  FLASHATTN_FUNC void wait_for_tile(int n, int part = 0) const {
    int turn = n * PARTS + part;
    arrived(turn).wait(turn / STAGES);
  }
  // Tells the producer that the warp has read the parts `first` to `end` - 1 of the tile.
  FLASHATTN_FUNC void release(int n, int first = 0, int end = PARTS) const {
    FLASHATTN_UNROLL
    for (int part = first; part < end; ++part) read(n * PARTS + part).arrive();
  }
  // Skips a tile that the warp does not need.
  FLASHATTN_FUNC void pass(int n) const {
    for (int part = 0; part < PARTS; ++part) wait_for_tile(n, part);
    release(n);
  }
};

}  // namespace flashattn
