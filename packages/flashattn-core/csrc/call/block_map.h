// The block map of an array mask (bool or additive) has a byte of flags for each block of 32 queries and 32 keys.
// Kernels skip a block whose entries hide all keys, and run no mask code in a block whose entries change no score. A
// bitwise OR of several blocks' flags describes these blocks together. Host C++ and kernels include this file.
#pragma once

namespace flashattn {

enum : int { kBlockSize = 32 };

enum : unsigned char {
  kBlockShows = 1,    // some entry leaves its key visible: true (bool), not -inf (additive)
  kBlockChanges = 2,  // some entry hides its key or changes its score: false (bool), not 0 (additive)
};

}  // namespace flashattn
