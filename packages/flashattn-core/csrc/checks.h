// What is refused: std::invalid_argument naming the argument, what was expected and what came.
#pragma once

#include <sstream>
#include <stdexcept>

#include "arguments.h"

namespace flashattn {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "[flash_attention] ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

void check(const Arguments& arguments);

// The part that new shapes alone can break, as in shapeless compilation.
void check_shapes(const Inputs& inputs, const Options& options);

}  // namespace flashattn
