// A launch's text: what it is specialised for and bound to, by name; its kernel's file; and the one instantiation.
#include "launch.h"

namespace flashattn::metal {
namespace {

// The same for all launches: which values constants have, and which arguments there are, MLX is told beside the text.
std::string declarations(const gpu::Launch& launch) {
  std::string text = "#include <metal_stdlib>\n";
  int number = 0;
  for (const gpu::Constant& constant : launch.constants) {
    const char* type = std::holds_alternative<bool>(constant.value) ? "bool" : "int";
    text += std::string("constant ") + type + " " + std::string(constant.name) + " [[function_constant(" +
            std::to_string(number++) + ")]];\n";
  }
  for (int i = 0; i < gpu::kNumBindings; ++i) {
    auto binding = static_cast<gpu::Binding>(i);
    text +=
        "#define FLASHATTN_BUFFER_" + std::string(gpu::name(binding)) + " " + std::to_string(buffer_of(binding)) + "\n";
  }
  return text;
}

}  // namespace

std::string source_text(const gpu::Launch& launch) {
  return declarations(launch) + text_of(sources(), launch) + "\ntemplate [[host_name(\"" + launch.function +
         "\")]] [[kernel]] decltype(" + launch.instantiation + ") " + launch.instantiation + ";\n";
}

}  // namespace flashattn::metal
