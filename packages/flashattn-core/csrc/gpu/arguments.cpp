// Chooses the arguments and constants of a launch, which depend on the arrays and options of the call.
#include "arguments.h"

#include <limits>
#include <string>

#include "../call/choose.h"

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

std::vector<Argument> backward_arguments(const GpuCall& call, Bindings outputs) {
  auto result =
      arguments({Binding::query, Binding::key, Binding::value, Binding::row_stats, Binding::dout, Binding::delta},
                outputs, {Binding::params, Binding::backward});
  add_masks_and_groups(result, call);
  return result;
}

}  // namespace flashattn::gpu
