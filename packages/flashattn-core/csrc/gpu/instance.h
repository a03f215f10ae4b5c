// Builds a Launch from an instantiation of a kernel template and its arguments, for all GPU backends.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>

#include "../call/choose.h"
#include "launch.h"

namespace flashattn::gpu {

constexpr int kLanes = 32;  // threads that run in lockstep: a warp, or a SIMD group

bool is_quantised(const GpuCall& call);

// A group is the query heads that share one key/value head. rows_of_group() throws NoKernelError if a group has too
// many rows.
int group_of(const GpuCall& call);
int64_t rows_of_group(const GpuCall& call);
int64_t num_groups(const GpuCall& call);

// Returns n, the number of threadgroups along an axis of a grid. Throws NoKernelError if n is too large for any GPU.
uint32_t size(int64_t n);
uint32_t batches(const GpuCall& call);

// Whether the last axis of query, key and value has stride 1 or size 1. backward_is_packed() also checks dout.
bool inputs_are_packed(const GpuCall& call);
bool backward_is_packed(const GpuCall& call, const BackwardParams& backward);

using Bindings = std::initializer_list<Binding>;
std::vector<Argument> arguments(Bindings inputs, Bindings outputs, Bindings values);
void add_if_present(std::vector<Argument>& arguments, const GpuCall& call, std::initializer_list<Input> optional);
void add_masks_and_groups(std::vector<Argument>& arguments, const GpuCall& call);

// The arguments of a kernel that computes the forward pass in one launch.
std::vector<Argument> whole_call(const GpuCall& call);

// An instantiation of the template `function` for the call's dtype and these sizes, such as "rowwise<half, Sizes>", or
// "rowwise<half, Sizes, uint>" for quantised keys. With the sizes 64 and 64, CUDA's entry point is
// "cuda_rowwise_half_64_64".
struct Instance {
  std::string function;
  std::vector<Constant> sizes;
  std::vector<Argument> arguments;
  Size grid;                      // in threadgroups
  int threads;                    // per threadgroup
  std::string source = function;  // the kernel's file, without its ending
  bool whole_rows = false, whole_keys = false;
};
Launch launch(Backend backend, const GpuCall& call, bool packed, Instance instance);

// head_dim and value_dim, each rounded up to a multiple of kLanes.
std::vector<Constant> whole_lanes(const GpuCall& call);

// Returns the text of the struct Sizes, which precedes a kernel's text. qualifier: text to put before each member's
// type, such as "constant " for Metal.
std::string sizes_text(const Launch& launch, std::string_view qualifier);

// Returns the launch that computes a mask's block map. dtype: the dtype of an additive mask, or none for a bool mask.
Launches block_map_launches(Backend backend, const ArrayParams& mask, std::optional<Dtype> dtype);

// The kernel texts that embed.py put into the module, keyed by file name without the ending. They are ASCII.
using Sources = std::map<std::string, std::string_view>;
std::string text_of(const Sources& sources, const Launch& launch);

}  // namespace flashattn::gpu
