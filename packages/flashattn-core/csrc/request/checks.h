// Checks of a call. They throw std::invalid_argument. Its text names the argument, what was expected and what was
// found.
#pragma once

#include "arguments.h"

namespace flashattn {

void check_arguments(const Arguments& arguments);

// Checks only what other shapes can make wrong. Needed because shapeless compilation gives other shapes to a call that
// check_arguments() has passed.
void check_shapes(const Inputs& inputs, const Options& options);

}  // namespace flashattn
