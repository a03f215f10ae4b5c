// What every kernel is given, by value: the structs of a call, and where its arrays are. Host C++ and kernels include
// this file.
#pragma once

#include "call/params.h"

namespace flashattn::cuda {

enum : int { kMaxArrays = 48 };

// What the tensor memory accelerator knows of an array; the driver makes it.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct Arguments {
  AttentionParams params;
  SplitParams split;
  RealignParams realign_params;
  void* arrays[kMaxArrays];                 // by gpu::Binding; null: the launch does not have it
  TensorMap query_map, key_map, value_map;  // only where the launch has boxes
};

}  // namespace flashattn::cuda
