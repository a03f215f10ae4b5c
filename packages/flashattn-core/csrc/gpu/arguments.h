// What the launches of all GPU backends have alike: constants and lists of arguments.
#pragma once

#include <initializer_list>

#include "launch.h"

namespace flashattn::gpu {

bool is_quantised(const Call& call);

// Query heads of a key/value head, and their rows. Throws NoKernelError where these are too many for a kernel.
int group_of(const Call& call);
int64_t rows_of_group(const Call& call);
int64_t num_groups(const Call& call);

// Of a grid, along one axis. Throws NoKernelError where no GPU takes so many.
uint32_t size(int64_t n);
uint32_t batches(const Call& call);

// Whether the last axis of the rows that a kernel reads has stride 1.
bool inputs_are_packed(const Call& call);
bool backward_is_packed(const Call& call, const BackwardParams& backward);

// The same names for every kernel.
std::vector<Constant> constants(const Call& call, bool packed, bool whole_rows, bool whole_keys);

using Bindings = std::initializer_list<Binding>;
std::vector<Argument> arguments(Bindings inputs, Bindings outputs, Bindings values);
void add_if_present(std::vector<Argument>& arguments, const Call& call, Bindings optional);
void add_masks_and_groups(std::vector<Argument>& arguments, const Call& call);

// What a kernel takes that has the whole call in one launch, and the kernels of the gradient.
std::vector<Argument> whole_call(const Call& call);
std::vector<Argument> delta_arguments(const Call& call);
std::vector<Argument> backward_arguments(const Call& call, Bindings outputs);

}  // namespace flashattn::gpu
