// One attention call as plain data: its sizes, options and dtypes, and which inputs it has. choose() reads it, kernels
// are compiled for it, and launches are made from it.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "dtype.h"
#include "inputs.h"
#include "params.h"

namespace flashattn {

// Limits that hold for every call, whichever kernel runs it.
constexpr int kMaxHeadDim = 512;
constexpr int kMaxPositions = 2147483647 - 1024;  // positions are int32, and loops may go one tile past the end

struct Call {
  AttentionParams params = {};               // the strides are 0 until MLX has evaluated the arrays
  Dtype dtype = Dtype::float32;              // of query and out, and of key and value if they are not quantised
  Dtype bias_dtype = Dtype::float32;         // of bias
  Dtype sinks_dtype = Dtype::float32;        // of sinks
  Dtype group_dtype = Dtype::float32;        // of scales and biases
  Precision precision = Precision::float32;  // as the caller asked
  std::array<bool, kNumInputs> given = {};   // which inputs the call has
  bool is_traced = false;                    // whether somebody may ask for the call's gradient

  bool has(Input input) const { return given[index(input)]; }
};

enum class Backend { cpu, metal, cuda };

// Whether the forward pass saves exact_out: out in float32, before it is rounded to 16 bits. The gradient needs it if
// its errors must be those of float32: where one key has nearly all of a row's weight, delta and dP cancel, and the
// rounding error of out would be left. Quantised keys and values have no gradient.
constexpr bool saves_exact_out(const Call& call, Backend backend) {
  bool rounds = backend == Backend::cuda && call.precision == Precision::input;
  return call.is_traced && !rounds && call.params.bits == 0 && size_of(call.dtype) == 2;
}

// Whether scale / softcap or the result of tanh could underflow. If so, GPU kernels divide by softcap in a separate
// step.
inline bool has_extreme_softcap(const AttentionParams& params) {
  constexpr float kLargest = 0x1p100f;
  if (params.softcap == 0) return false;
  return params.softcap > kLargest || std::abs(params.scale / params.softcap) < 1 / kLargest;
}

struct Costs;

// What a call runs on. Without a GPU, multiprocessors and shared_memory are those of an H100.
struct Device {
  Backend backend = Backend::cpu;
  int index = 0;               // MLX's number of the GPU
  int compute_capability = 0;  // of an NVIDIA GPU: 90 for 9.0; 0: unknown
  int multiprocessors = 132;
  int shared_memory = 227 * 1024;  // how many bytes a block can have at most
  const Costs* tuned = nullptr;    // what `mlxlm-flash tune` measured on this GPU; null: nothing
};

}  // namespace flashattn
