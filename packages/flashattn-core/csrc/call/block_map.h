// The block map of an array mask, bool or additive: one byte of flags for each block of 32 queries and 32 keys. Kernels
// skip the blocks whose keys are all hidden, and run no mask code in blocks that change no score. The flags of several
// blocks together are the bitwise OR of theirs. Host C++ and kernels include this file.
#pragma once

namespace flashattn {

enum : int { kBlockSize = 32 };

enum : unsigned char {
  kBlockShows = 1,    // some entry leaves its key visible: true, or not -inf
  kBlockChanges = 2,  // some entry hides its key or changes its score: false, or not 0
};

}  // namespace flashattn
