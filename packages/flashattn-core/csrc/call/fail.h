// fail(), which refuses a call with a message.
#pragma once

#include <sstream>
#include <stdexcept>

namespace flashattn {

// Throws std::invalid_argument, which becomes Python's ValueError. The message joins the parts, which name the wrong
// argument, what was found and what was expected.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "[flash_attention] ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace flashattn
