// The block map of a mask that is an array: one byte for each block of 32 rows and 32 keys, so that kernels skip the
// blocks that hide all of their keys, and run no mask code where nothing is hidden. The byte of several blocks together
// is the "or" of theirs. Host C++ and kernels include this file.
#pragma once

namespace flashattn {

enum : int { kBlockSize = 32 };

enum : unsigned char {
  kBlockShows = 1,    // some entry is visible: true, or not -inf
  kBlockChanges = 2,  // some entry hides its key, or changes its score: false, or not 0
};

}  // namespace flashattn
