// Tiles that one warpgroup brings and others use, on compute capability 9.0: the tensor memory accelerator copies them,
// barriers in shared memory say what has arrived and what has been read.
#pragma once

#include "shared_tile.h"

namespace flashattn {

// It opens each time that so many have arrived at it, and so many bytes as were expected.
struct Barrier {
  uint address;

  FLASHATTN_FUNC void initialise(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  }
  FLASHATTN_FUNC void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  }
  FLASHATTN_FUNC void arrive_and_expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  }
  // Until it has opened for the time of this number, counted from 0.
  FLASHATTN_FUNC void wait(int time) const {
    asm volatile(
        "{ .reg .pred open; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1; @open bra DONE; bra AGAIN;"
        " DONE: }" ::"r"(address),
        "r"(time % 2)
        : "memory");
  }
};
constexpr int kBarrierBytes = 8;

// Before anyone waits at a barrier, once all of them are initialised.
FLASHATTN_FUNC void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// What this thread has stored in shared memory is there for the tensor cores.
FLASHATTN_FUNC void publish_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Registers that the warps of this warpgroup need, of those that the block was launched with. More than there are would
// wait for ever.
template <int COUNT>
FLASHATTN_FUNC void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
FLASHATTN_FUNC void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// One thread brings ROWS rows of all panels to rows of a tile; zeros for what is outside of the array.
template <int ROWS, typename Tile>
FLASHATTN_FUNC void bring_boxes(Tile tile, int first_row, const cuda::TensorMap& map, int row, int head, int batch,
                                Barrier arrived) {
  FLASHATTN_UNROLL
  for (int panel = 0; panel < Tile::kBytes / Tile::kPanel; ++panel) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
            "r"(tile.memory + panel * Tile::kPanel + first_row * 128),
        "l"(&map), "r"(panel * 64), "r"(row), "r"(head), "r"(batch), "r"(arrived.address)
        : "memory");
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

  // By one thread. writers: threads that arrive when they have brought a tile; readers: warps that read it.
  FLASHATTN_FUNC void initialise(int writers, int readers) const {
    for (int n = 0; n < STAGES; ++n) {
      arrived(n).initialise(writers);
      read(n).initialise(readers);
    }
  }
  FLASHATTN_FUNC void wait_for_tile(int n) const { arrived(n).wait(n / STAGES); }
  FLASHATTN_FUNC void wait_for_room(int n) const {
    if (n >= STAGES) read(n).wait(n / STAGES - 1);
  }
  // The warp has read the tile.
  FLASHATTN_FUNC void release(int n, int lane) const {
    if (lane == 0) read(n).arrive();
  }
};

}  // namespace flashattn
