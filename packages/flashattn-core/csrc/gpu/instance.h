// An instantiation of a kernel's text, as a launch: what all GPU backends have alike.
#pragma once

#include <map>
#include <optional>

#include "../call/kernel_table.h"
#include "launch.h"

namespace flashattn::gpu {

constexpr int kLanes = 32;  // threads that run in step: a warp, or a SIMD group

// `function` for the call's dtype and these sizes: CUDA's "rowwise<half, Sizes>" with a dim and a value_dim of 64 is
// "cuda_rowwise_half_64_64"; with quantised keys and values, if it reads them, "rowwise<half, Sizes, uint>".
struct Instance {
  std::string function;
  std::vector<Constant> sizes;
  std::vector<Argument> arguments;
  Size grid;                      // in threadgroups
  int threads;                    // of a threadgroup
  std::string source = function;  // the file
  bool whole_rows = false, whole_keys = false;
};
Launch launch(Backend backend, const Call& call, bool packed, Instance instance);

// head_dim and value_dim, rounded up to whole warps.
std::vector<Constant> whole_lanes(const Call& call);

// The struct Sizes, which a kernel's text begins with. qualifier: what the language asks of a constant member.
std::string sizes_text(const Launch& launch, std::string_view qualifier);

// Copies an array of elements of so many bytes, which may begin anywhere.
Launches realign_launches(Backend backend, const ArrayParams& params, int itemsize);

// Finds the block map of a mask. dtype: none for bool.
Launches block_map_launches(Backend backend, const ArrayParams& mask, std::optional<Dtype> dtype);

// Texts that embed.py has put into the module, by the names of their files without ".metal" or ".cu". ASCII.
using Sources = std::map<std::string, std::string_view>;
std::string text_of(const Sources& sources, const Launch& launch);

}  // namespace flashattn::gpu
