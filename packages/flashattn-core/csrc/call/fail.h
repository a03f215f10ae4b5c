// How a call is refused.
#pragma once

#include <sstream>
#include <stdexcept>

namespace flashattn {

// Throws std::invalid_argument, which Python sees as ValueError. The parts name what is wrong, what was expected and
// what came.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "[flash_attention] ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace flashattn
