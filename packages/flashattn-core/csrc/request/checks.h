// What is refused: std::invalid_argument naming the argument, what was expected and what came.
#pragma once

#include "arguments.h"

namespace flashattn {

void check_arguments(const Arguments& arguments);

// The part that new shapes alone can break, as in shapeless compilation.
void check_shapes(const Inputs& inputs, const Options& options);

}  // namespace flashattn
