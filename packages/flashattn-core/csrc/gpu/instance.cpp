// Builds launches: names instantiations and their specialisations, and sets their constants.
#include "instance.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "arguments.h"
#include "split.h"

namespace flashattn::gpu {
namespace {

std::string type_name(Dtype dtype) {
  return dtype == Dtype::float32 ? "float" : dtype == Dtype::float16 ? "half" : "bfloat";
}

std::string number_of(const Constant& constant) {
  return std::visit([](auto number) { return std::to_string(number); }, constant.value);
}

// Appends the values of constants to a name, so that kernels that are compiled differently have different names.
std::string specialised(std::string function, const std::vector<Constant>& constants) {
  for (const Constant& constant : constants) function += "_" + number_of(constant);
  return function;
}

#ifdef FLASHATTN_PLANTS
// FLASHATTN_PLANT plants a fault for a test. The value "old => new" replaces the first `old` in each kernel text.
std::string planted(std::string text) {
  const char* variable = std::getenv("FLASHATTN_PLANT");
  if (!variable) return text;
  std::string_view plant = variable, arrow = " => ";
  size_t end = plant.find(arrow);
  if (end == std::string::npos) {
    throw std::invalid_argument("[flash_attention] FLASHATTN_PLANT is '" + std::string(plant) +
                                "', expected 'old => new'");
  }
  size_t at = text.find(plant.substr(0, end));
  return at == std::string::npos ? text : text.replace(at, end, plant.substr(end + arrow.size()));
}
#else
std::string planted(std::string text) {
  return text;
}
#endif

}  // namespace

Launch launch(Backend backend, const GpuCall& call, bool packed, Instance instance) {
  std::string arguments = type_name(call.dtype);
  std::string function =
      specialised(std::string(name(backend)) + "_" + instance.function + "_" + arguments, instance.sizes);
  arguments += ", Sizes";
  constexpr Argument kKey = {Binding::key, Role::input};
  bool reads_keys = std::find(instance.arguments.begin(), instance.arguments.end(), kKey) != instance.arguments.end();
  if (reads_keys && is_quantised(call)) {
    arguments += ", uint";
    function += "_quantised";
  }
  auto values = constants(call, packed, instance.whole_rows, instance.whole_keys);
  std::string specialisation = specialised(function, values);
  return {.source = std::move(instance.source),
          .function = std::move(function),
          .instantiation = instance.function + "<" + arguments + ">",
          .sizes = std::move(instance.sizes),
          .constants = std::move(values),
          .specialisation = std::move(specialisation),
          .arguments = std::move(instance.arguments),
          .grid = instance.grid,
          .threadgroup = {size(instance.threads), 1, 1}};
}

std::vector<Constant> whole_lanes(const GpuCall& call) {
  return {{"dim", round_up(call.params.head_dim, kLanes)}, {"value_dim", round_up(call.params.value_dim, kLanes)}};
}

std::string sizes_text(const Launch& launch, std::string_view qualifier) {
  if (launch.sizes.empty()) return "";
  std::string text = "struct Sizes {\n";
  for (const Constant& size : launch.sizes) {
    text += "  static constexpr " + std::string(qualifier) + "int " + std::string(size.name) + " = " + number_of(size) +
            ";\n";
  }
  return text + "};\n";
}

Launches block_map_launches(Backend backend, const ArrayParams& mask, std::optional<Dtype> dtype) {
  constexpr int kThreads = 256, kBlocks = 8;  // per threadgroup; each SIMD group reads one block
  std::string number = dtype ? std::to_string(static_cast<int>(*dtype)) : "-1";
  std::string function = std::string(name(backend)) + "_block_map_" + (dtype ? number : "bool");
  auto values = constants({}, false, false, false);
  Launches result = {.array = mask};
  result.launches = {{.source = "block_map",
                      .function = function,
                      .instantiation = "block_map<" + number + ">",
                      .constants = values,
                      .specialisation = specialised(function, values),
                      .arguments = arguments({Binding::mask}, {Binding::found_blocks}, {Binding::array_params}),
                      .grid = {gpu::size(divide_up(mask.count, kBlocks)), 1, 1},
                      .threadgroup = {kThreads, 1, 1}}};
  return result;
}

std::string text_of(const Sources& sources, const Launch& launch) {
  auto source = sources.find(launch.source);
  if (source == sources.end()) {
    throw std::logic_error("no kernel file is called '" + launch.source + "'");
  }
  return planted(std::string(source->second));
}

}  // namespace flashattn::gpu
