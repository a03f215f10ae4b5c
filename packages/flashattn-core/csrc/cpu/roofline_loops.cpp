// What the machine can do at best, as far as attention is concerned: multiply-adds in registers, and reading.
//
// Compiled once per instruction set, see simd.h.
#include "kernels.h"
#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {
namespace {

// Independent sums: more than the longest latency (5 cycles) times the most units (2), fewer than the registers.
constexpr int kChains = 12;

float multiply_add(int64_t steps) {
  vfloat sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = broadcast(static_cast<float>(c));  // equal chains would be made one
  vfloat factor = broadcast(0.5f), term = broadcast(1.0f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sum[c] = sum[c] * factor + term;
  }
  vfloat total = {};
  for (int c = 0; c < kChains; ++c) total += sum[c];
  return total[0];
}

float read(const float* data, int64_t size) {
  vfloat sum[4] = {};
  for (int64_t i = 0; i + 4 * kWidth <= size; i += 4 * kWidth) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) sum[c] += load(data + i + c * kWidth);
  }
  return (sum[0] + sum[1] + sum[2] + sum[3])[0];
}

}  // namespace

const RooflineLoops roofline_loops = {multiply_add, int64_t{2} * kChains* kWidth, read};

}  // namespace flashattn::cpu::FLASHATTN_ISA
