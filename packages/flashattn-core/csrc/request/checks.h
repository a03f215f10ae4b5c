// Checks of a call. They throw std::invalid_argument. The message names the argument, the value expected and the value
// found.
#pragma once

#include "arguments.h"

namespace flashattn {

void check_arguments(const Arguments& arguments);

// Checks shapes again. Needed because shapeless compilation may change the shapes after check_arguments().
void check_shapes(const Inputs& inputs, const Options& options);

}  // namespace flashattn
