// Checks of a call. They throw std::invalid_argument, which names the argument, what was expected and what was found.
#pragma once

#include "arguments.h"

namespace flashattn {

void check_arguments(const Arguments& arguments);

// Checks only what other shapes can make wrong: shapeless compilation gives a checked call other shapes.
void check_shapes(const Inputs& inputs, const Options& options);

}  // namespace flashattn
