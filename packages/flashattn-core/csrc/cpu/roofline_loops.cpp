// The loops that measure what limits attention on this machine: multiply-adds in registers, and memory reads.
//
// Compiled once per instruction set, see simd.h.
#include "kernels.h"
#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {
namespace {

// The number of independent sums. It is more than the longest latency (5 cycles) times the most FMA units (2), and less
// than the number of registers.
constexpr int kChains = 12;

float multiply_add(int64_t steps) {
  // The numbers use all their bits. With zeros, a processor draws less power than in the attention kernels, and so runs
  // at a higher clock rate.
  float numbers[(kChains + 1) * kWidth];
  uint32_t random = 1;
  for (float& number : numbers) {
    random = random * 1664525u + 1013904223u;  // Numerical Recipes' generator
    number = static_cast<float>(random) * 0x1p-32f;
  }
  vfloat sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = load(numbers + c * kWidth);
  vfloat factor = broadcast(-0.999f), term = load(numbers + kChains * kWidth);
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
