// The arguments of kernels, passed by value: a call's structs, and its arrays' addresses. Host C++ includes it too.
#pragma once

#include "call/params.h"

namespace flashattn {

// The gradients that one launch computes.
enum Gradient : int { kDq, kDkAndDv, kDk, kDv };

namespace cuda {

enum : int {
  kMaxArrays = 42,
  kPartialPadding = 4,  // numbers beside a row's output in cuda_prefill's partial results: maximum, sum, two unused
  kSavedTile = 64,      // queries: what is saved for the gradient is padded to whole tiles of this size
};

// How the tensor memory accelerator (TMA) sees an array, a CUtensorMap. The driver makes it.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct Arguments {
  void* arrays[kMaxArrays];  // by gpu::Binding; null: the launch does not have the array
  SplitParams split;
  AttentionParams params;
  ArrayParams array_params;
};

// For launches with boxes. Other launches need not copy these bytes.
struct BoxArguments : Arguments {
  TensorMap key_map, value_map, query_map, dout_map;
};

struct BackwardArguments : BoxArguments {
  BackwardParams backward;
};

}  // namespace cuda
}  // namespace flashattn
