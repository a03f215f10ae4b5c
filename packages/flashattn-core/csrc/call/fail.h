// fail(), which refuses a call with a message.
#pragma once

#include <sstream>
#include <stdexcept>

namespace flashattn {

// Throws std::invalid_argument, which becomes Python's ValueError. Its message is the parts, one after the other: they
// name the wrong argument, what was found and what was expected.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "[flash_attention] ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace flashattn
