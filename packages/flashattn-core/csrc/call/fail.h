// fail(), which refuses a call with a message.
#pragma once

#include <sstream>
#include <stdexcept>

namespace flashattn {

// Throws std::invalid_argument, which becomes Python's ValueError. The message names the argument, the value found and
// the value expected.
template <typename... Words>
[[noreturn]] void fail(const Words&... words) {
  std::ostringstream message;
  message << "[flash_attention] ";
  (message << ... << words);
  throw std::invalid_argument(message.str());
}

}  // namespace flashattn
