// What kernels are given, by value: the structs of a call, and where its arrays are. Host C++ includes it too.
#pragma once

#include "call/params.h"

namespace flashattn {

// What a launch of the gradient computes.
enum Gradient : int { kDq, kDkAndDv, kDk, kDv };

namespace cuda {

enum : int {
  kMaxArrays = 42,
  kPartialPadding = 4,  // of a row that a block of cuda_prefill leaves: maximum, sum, and two unused numbers
  kSavedTile = 64,      // what is saved for the gradient is of whole tiles of so many queries
};

// What the tensor memory accelerator knows of an array; the driver makes it.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct Arguments {
  void* arrays[kMaxArrays];  // by gpu::Binding; null: the launch does not have it
  SplitParams split;
  AttentionParams params;
  ArrayParams array_params;
};

// Where the launch has boxes. The others are spared these bytes, which a launch copies.
struct BoxArguments : Arguments {
  TensorMap key_map, value_map, query_map, dout_map;
};

struct BackwardArguments : BoxArguments {
  BackwardParams backward;
};

}  // namespace cuda
}  // namespace flashattn
