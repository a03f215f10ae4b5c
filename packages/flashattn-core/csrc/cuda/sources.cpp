// A launch's text: what it is specialised for, by name; its kernel's file; and the entry, which is the one kernel that
// NVRTC compiles.
#include "launch.h"

namespace flashattn::cuda {
namespace {

std::string declarations(const gpu::Launch& launch) {
  // No warnings of constants that a kernel does not use, and of divisions by those that a call does not have.
  std::string text = "#pragma nv_diag_suppress 39, 177\n";
  text += "typedef int int32_t;\ntypedef long long int64_t;\ntypedef unsigned long long uint64_t;\n";
  for (const gpu::Constant& constant : launch.constants) {
    const bool* flag = std::get_if<bool>(&constant.value);
    std::string value = flag ? (*flag ? "true" : "false") : std::to_string(std::get<int32_t>(constant.value));
    text += std::string("constexpr ") + (flag ? "bool " : "int ") + std::string(constant.name) + " = " + value + ";\n";
  }
  for (int i = 0; i < gpu::kNumBindings; ++i) {
    text += "#define FLASHATTN_BINDING_" + std::string(gpu::name(static_cast<gpu::Binding>(i))) + " " +
            std::to_string(i) + "\n";
  }
  return text;
}

}  // namespace

std::string source_text(const gpu::Launch& launch) {
  return declarations(launch) + text_of(sources(), launch) + "\nextern \"C\" __global__ void __launch_bounds__(" +
         std::to_string(launch.threadgroup[0]) + ", " + std::to_string(launch.blocks_at_once) + ") " + launch.function +
         "(const __grid_constant__ flashattn::cuda::Arguments arguments) {\n  " + launch.instantiation +
         "(arguments);\n}\n";
}

}  // namespace flashattn::cuda
