// Limits that hold for every call, whichever kernel runs it.
#pragma once

namespace flashattn {

constexpr int kMaxHeadDim = 512;
constexpr int kMaxPositions = 2147483647 - 1024;  // positions are int32, and loops may go one tile past the end

// The numbers of bits and the group sizes that quantised keys and values may have.
constexpr bool is_valid_bits(int bits) {
  return (1 <= bits && bits <= 6) || bits == 8;
}
constexpr bool is_valid_group_size(int group_size) {
  return group_size == 32 || group_size == 64 || group_size == 128;
}

}  // namespace flashattn
