// The block map of an array mask (bool or additive) has a byte of flags for each block of 32 queries and 32 keys.
// Kernels skip a block whose entries hide all keys, and run no mask code in a block whose entries change no score. The
// flags of several blocks can be combined with a bitwise OR. Host C++ and kernels include this file.
#pragma once

namespace flashattn {

enum : int { kBlockSize = 32 };

enum : unsigned char {
  kBlockShows = 1,    // some entry leaves its key visible (in a bool mask: true, in an additive mask: not -inf)
  kBlockChanges = 2,  // some entry hides its key or changes its score (bool: false, additive: anything but 0)
};

}  // namespace flashattn
