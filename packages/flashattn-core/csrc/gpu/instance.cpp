// Builds launches: names instantiations and their specialisations, and sets their constants and arguments, which depend
// on the arrays and options of the call.
#include "instance.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "split.h"

namespace flashattn::gpu {
namespace {

// Whether a row's elements are adjacent. If a row has only one element, the stride does not matter.
bool is_packed(const Strides& strides, int columns) {
  return strides.column == 1 || columns == 1;
}

// Returns n. Throws NoKernelError if n exceeds the largest int32, because kernels and grids cannot count further.
int64_t countable(int64_t n, const std::string& what) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (n > kMost) {
    throw NoKernelError("[flash_attention] the call has " + std::to_string(n) + " " + what +
                        ", but GPUs count only up to " + std::to_string(kMost) + ": split its batch, heads or queries");
  }
  return n;
}

// Returns a kernel's constants. Their names are the same for all kernels.
std::vector<Constant> constants(const GpuCall& call, bool packed, bool whole_rows, bool whole_keys) {
  const AttentionParams& p = call.params;
  std::vector<Constant> result;
  result.reserve(2 * kNumBindings);  // large enough that there is only one allocation
  result = {
      {"head_dim", p.head_dim},
      {"value_dim", p.value_dim},
      {"bias_dtype", static_cast<int32_t>(call.bias_dtype)},
      {"sinks_dtype", static_cast<int32_t>(call.sinks_dtype)},
      {"quant_bits", p.bits},
      {"group_size", p.group_size},
      {"group_dtype", static_cast<int32_t>(call.group_dtype)},
      {"packed_rows", packed},
      {"whole_rows", whole_rows},  // the last tile of query rows is full
      {"whole_keys", whole_keys},  // the last tile of keys is full
      {"extreme_softcap", has_extreme_softcap(p)},
      {"has_exact_out", call.has_exact_out},
  };
#define FLASHATTN_HAS_OPTION(type, name) result.push_back({"has_" #name, p.name != type{}});
#define FLASHATTN_HAS_INPUT(name, ...) result.push_back({"has_" #name, call.has(Input::name)});
  FLASHATTN_OPTIONS(FLASHATTN_HAS_OPTION)
  FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_HAS_INPUT)
#undef FLASHATTN_HAS_OPTION
#undef FLASHATTN_HAS_INPUT
  return result;
}

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

// FLASHATTN_PLANT plants a fault for a test. The value "old => new" replaces the first `old` in each kernel text.
std::string planted(std::string text) {
#ifdef FLASHATTN_PLANTS
  const char* variable = std::getenv("FLASHATTN_PLANT");
  if (!variable) return text;
  std::string_view plant = variable, arrow = " => ";
  size_t end = plant.find(arrow);
  if (end == std::string::npos) {
    throw std::invalid_argument("[flash_attention] FLASHATTN_PLANT is '" + std::string(plant) +
                                "', expected 'old => new'");
  }
  size_t at = text.find(plant.substr(0, end));
  if (at != std::string::npos) text.replace(at, end, plant.substr(end + arrow.size()));
#endif
  return text;
}

}  // namespace

bool is_quantised(const GpuCall& call) {
  return call.params.bits != 0;
}

int group_of(const GpuCall& call) {
  return call.params.num_heads / call.params.num_kv_heads;
}

int64_t rows_of_group(const GpuCall& call) {
  return countable(int64_t{call.params.query_len} * group_of(call), "queries that share a key/value head");
}

int64_t num_groups(const GpuCall& call) {
  return call.params.num_kv_heads * call.params.batch_size;
}

uint32_t size(int64_t n) {
  return static_cast<uint32_t>(countable(n, "threadgroups side by side"));
}

uint32_t batches(const GpuCall& call) {
  return size(call.params.batch_size);
}

bool inputs_are_packed(const GpuCall& call) {
  const AttentionParams& p = call.params;
  return is_packed(p.query, p.head_dim) && is_packed(p.key, p.head_dim) && is_packed(p.value, p.value_dim);
}

bool backward_is_packed(const GpuCall& call, const BackwardParams& backward) {
  return inputs_are_packed(call) && is_packed(backward.dout, call.params.value_dim);
}

std::vector<Argument> arguments(Bindings inputs, Bindings outputs, Bindings values) {
  std::vector<Argument> result;
  result.reserve(kNumBindings);
  for (Binding binding : inputs) result.push_back({binding, Role::input});
  for (Binding binding : outputs) result.push_back({binding, Role::output});
  for (Binding binding : values) result.push_back({binding, Role::value});
  return result;
}

void add_if_present(std::vector<Argument>& arguments, const GpuCall& call, std::initializer_list<Input> optional) {
  for (Input input : optional) {
    if (call.has(input)) arguments.push_back({binding_of(input), Role::input});
  }
}

void add_masks_and_groups(std::vector<Argument>& arguments, const GpuCall& call) {
#define FLASHATTN_INPUT(name, ...) Input::name,
  add_if_present(arguments, call, {FLASHATTN_MASKS(FLASHATTN_INPUT) FLASHATTN_GROUPS(FLASHATTN_INPUT)});
#undef FLASHATTN_INPUT
}

std::vector<Argument> whole_call(const GpuCall& call) {
  auto result = arguments({Binding::query, Binding::key, Binding::value}, {Binding::out}, {Binding::params});
  if (call.has_row_results)
    result.insert(result.end(), {{Binding::lse, Role::output}, {Binding::row_stats, Role::output}});
  add_masks_and_groups(result, call);
  if (call.has_exact_out) result.push_back({Binding::exact_out, Role::output});
  add_if_present(result, call, {Input::sinks});
  return result;
}

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
