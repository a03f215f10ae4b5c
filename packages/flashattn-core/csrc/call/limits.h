// Limits that hold for every call, whichever kernel runs it.
#pragma once

namespace flashattn {

constexpr int kMaxHeadDim = 512;
constexpr int kMaxPositions = 2147483647 - 1024;  // positions are int32, and loops may go one tile past the end

}  // namespace flashattn
