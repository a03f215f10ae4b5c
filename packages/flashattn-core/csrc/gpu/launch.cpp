// Finds the names and the values of a launch's arguments.
#include "launch.h"

#include <stdexcept>

namespace flashattn::gpu {

std::string_view name(Binding binding) {
#define FLASHATTN_NAME(name, ...) #name,
  static constexpr std::string_view kNames[] = {FLASHATTN_INPUTS(FLASHATTN_NAME)
                                                    FLASHATTN_FURTHER_BINDINGS(FLASHATTN_NAME) "count",
                                                FLASHATTN_CACHE_BINDINGS(FLASHATTN_NAME)};
#undef FLASHATTN_NAME
  return kNames[static_cast<int>(binding)];
}

std::span<const std::byte> value_of(const Launches& launches, Binding binding) {
  switch (binding) {
    case Binding::params: return std::as_bytes(std::span(&launches.params, 1));
    case Binding::split: return std::as_bytes(std::span(&launches.split, 1));
    case Binding::backward: return std::as_bytes(std::span(&launches.backward, 1));
    case Binding::array_params: return std::as_bytes(std::span(&launches.array, 1));
    default: throw std::logic_error(std::string(name(binding)) + " is an array, and no value");
  }
}

}  // namespace flashattn::gpu
