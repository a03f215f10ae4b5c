// What kernels are given, by value: the structs of a call, and where its arrays are. Host C++ includes it too.
#pragma once

#include "call/params.h"

namespace flashattn::cuda {

enum : int { kMaxArrays = 32 };

// What the tensor memory accelerator knows of an array; the driver makes it.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct Arguments {
  void* arrays[kMaxArrays];  // by gpu::Binding; null: the launch does not have it
  SplitParams split;
  AttentionParams params;
  RealignParams realign_params;
};

// Where the launch has boxes. The others are spared these bytes, which a launch copies.
struct BoxArguments : Arguments {
  TensorMap query_map, key_map, value_map;
};

// Of the gradient.
struct BackwardArguments : Arguments {
  BackwardParams backward;
};

}  // namespace flashattn::cuda
