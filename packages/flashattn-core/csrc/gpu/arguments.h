// Makes the constants of a launch, and its list of arguments, for all GPU backends.
#pragma once

#include <initializer_list>

#include "launch.h"

namespace flashattn::gpu {

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

// Returns a kernel's constants. Their names are the same for all kernels.
std::vector<Constant> constants(const GpuCall& call, bool packed, bool whole_rows, bool whole_keys);

using Bindings = std::initializer_list<Binding>;
std::vector<Argument> arguments(Bindings inputs, Bindings outputs, Bindings values);
void add_if_present(std::vector<Argument>& arguments, const GpuCall& call, std::initializer_list<Input> optional);
void add_masks_and_groups(std::vector<Argument>& arguments, const GpuCall& call);

// The arguments of a kernel that computes the forward pass in one launch, and those of a kernel of the gradient.
std::vector<Argument> whole_call(const GpuCall& call);
std::vector<Argument> backward_arguments(const GpuCall& call, Bindings outputs);

}  // namespace flashattn::gpu
