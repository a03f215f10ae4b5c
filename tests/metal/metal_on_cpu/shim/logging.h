// <metal_logging>: messages go nowhere.
#pragma once

namespace metal {
struct os_log {
#ifdef MSL_CHECK_ADDRESS_SPACES
  constexpr os_log(constant char*, constant char*) constant {}
  template <class... Arguments>
  void log_debug(constant char*, Arguments...) const constant {}
  template <class... Arguments>
  void log_debug(constant char*, Arguments...) const thread {}
#else
  constexpr os_log(const char*, const char*) {}
  template <class... Arguments>
  void log_debug(const char*, Arguments...) const {}
#endif
};
}  // namespace metal
