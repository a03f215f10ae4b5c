// A launch's text: its kernel's file, and the one instantiation.
#include "sources.h"

#include <stdexcept>

#include "launch.h"

namespace flashattn::metal {

std::string source_text(const Launch& launch) {
  auto source = sources().find(launch.source);
  if (source == sources().end()) {
    throw std::logic_error("no Metal kernel file is called '" + launch.source + "'");
  }
  return std::string(source->second) + "\ntemplate [[host_name(\"" + launch.function + "\")]] [[kernel]] decltype(" +
         launch.instantiation + ") " + launch.instantiation + ";\n";
}

}  // namespace flashattn::metal
