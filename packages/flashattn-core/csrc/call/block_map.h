// The block map of an array mask, bool or additive: a byte of flags per block of 32 queries and 32 keys. Kernels skip
// blocks that show no key, and run no mask code in blocks that change no score. To describe several blocks at once,
// their flags are combined by a bitwise OR. Host C++ and kernels include this file.
#pragma once

namespace flashattn {

enum : int { kBlockSize = 32 };

enum : unsigned char {
  kBlockShows = 1,    // some entry leaves its key visible: true (bool), not -inf (additive)
  kBlockChanges = 2,  // some entry hides its key or changes its score: false (bool), not 0 (additive)
};

}  // namespace flashattn
