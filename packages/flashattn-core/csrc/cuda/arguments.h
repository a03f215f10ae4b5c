// Structs that kernels take by value as their argument. They hold a call's parameters and the addresses of its arrays.
// Host C++ and kernels include this file.
#pragma once

#include "call/params.h"

namespace flashattn {

// The gradients that one launch computes.
enum Gradient : int { kDq, kDkAndDv, kDk, kDv };

namespace cuda {

enum : int {
  kMaxArrays = 42,
  kPartialPadding = 4,  // numbers after a row's output in cuda_prefill's partial results: maximum, sum, two unused
  kSavedTile = 128,     // saved_rows pads each head to a multiple of this many queries
};

// A CUtensorMap, which describes an array to the tensor memory accelerator (TMA). The driver writes it.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct Arguments {
  void* arrays[kMaxArrays];  // indexed by gpu::Binding; null if the launch does not use the array
  SplitParams split;
  AttentionParams params;
  ArrayParams array_params;
};

// The arguments of launches that use the TMA. Other launches need not copy the tensor maps.
struct BoxArguments : Arguments {
  TensorMap key_map, value_map, query_map, dout_map;
};

struct BackwardArguments : BoxArguments {
  BackwardParams backward;
};

}  // namespace cuda
}  // namespace flashattn
