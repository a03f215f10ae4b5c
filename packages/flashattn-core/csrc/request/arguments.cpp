// Turns a call's arguments into a primitive's inputs, and finds inputs by name.
#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "../cuda/driver.h"
#include "../gpu/disk_cache.h"
#include "mlx/backend/cuda/cuda.h"
#include "mlx/ops.h"

namespace flashattn {
namespace {

mx::array as_kernels_read_it(const mx::array& given, InputDtype dtype, Backend backend, const mx::Stream& stream) {
  bool whole_numbers = !mx::issubdtype(given.dtype(), mx::floating);
  bool is_cast = dtype == InputDtype::slopes || (dtype == InputDtype::additive && whole_numbers) ||
                 (dtype == InputDtype::logits && (whole_numbers || backend == Backend::cpu));
  return is_cast ? mx::astype(given, mx::float32, stream) : given;
}

}  // namespace

Present present_in(const Arguments& arguments) {
  Present present;
  for (int i = 0; i < kNumInputs; ++i) {
    present[i] = arguments.inputs[i].has_value();
  }
  return present;
}

Arrays primitive_inputs(const Arguments& arguments, Backend backend, const mx::Stream& stream) {
  Arrays inputs;
  for (const InputRule& rule : kInputRules) {
    if (const auto& given = arguments.inputs[index(rule.input)]) {
      inputs.push_back(as_kernels_read_it(*given, rule.dtype, backend, stream));
    }
  }
  return inputs;
}

Inputs::Inputs(const Arrays& primitive_inputs, const Present& present) {
  size_t next = 0;
  for (int i = 0; i < kNumInputs; ++i) {
    arrays_[i] = present[i] ? &primitive_inputs[next++] : nullptr;
  }
}

Inputs::Inputs(const Arguments& arguments) {
  for (int i = 0; i < kNumInputs; ++i) {
    arrays_[i] = arguments.inputs[i] ? &*arguments.inputs[i] : nullptr;
  }
}

int columns_of(const mx::array& tensor, const Options& options) {
  if (options.bits == 0) {
    return tensor.shape(kColumn);
  }
  int64_t columns = int64_t{tensor.shape(kColumn)} * 32 / options.bits;
  return static_cast<int>(std::min<int64_t>(columns, std::numeric_limits<int>::max()));  // the checks reject INT_MAX
}

Dtype dtype_of(mx::Dtype dtype) {
  // primitive_inputs() casts whole numbers to float32.
  return dtype == mx::float16 ? Dtype::float16 : dtype == mx::bfloat16 ? Dtype::bfloat16 : Dtype::float32;
}

Call describe(const Inputs& inputs, const Options& options, bool is_traced) {
  const mx::array &query = inputs.query(), &key = inputs.key();
  const auto dtype = [&](Input input) { return inputs[input] ? dtype_of(inputs[input]->dtype()) : Dtype::float32; };
  Call call = {.dtype = dtype(Input::query),
               .bias_dtype = dtype(Input::bias),
               .sinks_dtype = dtype(Input::sinks),
               .group_dtype = dtype(Input::key_scales),
               .precision = options.precision,
               .is_traced = is_traced};
  AttentionParams& params = call.params;
  params.batch_dims = static_cast<int32_t>(query.ndim()) - 3;
  params.batch_size = 1;
  for (int d = 0; d < params.batch_dims; ++d) {
    params.batch_shape[d] = query.shape(d);
    params.batch_size *= query.shape(d);
  }
  params.num_heads = query.shape(kHead);
  params.num_kv_heads = key.shape(kHead);
  params.query_len = query.shape(kRow);
  params.key_len = key.shape(kRow);
  params.head_dim = query.shape(kColumn);
  params.value_dim = columns_of(inputs.value(), options);
  params.tree_size = inputs[Input::tree] ? inputs[Input::tree]->shape(-2) : 0;
  // The default scale is not computed when the call is built, because shapeless compilation may change D later.
  params.scale = options.scale.value_or(1 / std::sqrt(static_cast<float>(params.head_dim)));
#define FLASHATTN_SET_OPTION(type, name) params.name = options.name;
  FLASHATTN_OPTIONS(FLASHATTN_SET_OPTION)
#undef FLASHATTN_SET_OPTION
  // The only query is the last one and sees all keys, so one program serves both steps with and without the flag.
  if (params.query_len == 1 && params.window == 0) params.causal = false;
  for (const InputRule& rule : kInputRules) call.given[index(rule.input)] = inputs[rule.input] != nullptr;
  return call;
}

Call describe(const Arguments& arguments) {
  return describe(Inputs(arguments), arguments.options, is_traced(arguments));
}

bool is_traced(const Arguments& arguments) {
  const auto& inputs = arguments.inputs;
  return std::any_of(inputs.begin(), inputs.end(), [](const auto& input) { return input && input->is_tracer(); });
}

namespace {

// What `mlxlm-flash tune` measured on the GPU with this name, read once; null if it measured nothing.
const Costs* tuned_costs(const std::string& gpu) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::string, Costs>;  // never destroyed: calls may outlive static destruction
  std::lock_guard lock(mutex);
  auto found = all.find(gpu);
  if (found == all.end()) {
    std::string file = gpu::costs_file(gpu);
    try {
      found = all.emplace(gpu, read_costs(gpu::read_private(file))).first;
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string(error.what()) + " Delete " + file + ", or run `mlxlm-flash tune` again.");
    }
  }
  return found->second.source.empty() ? nullptr : &found->second;
}

}  // namespace

Device device_of(const mx::Device& device) {
  thread_local std::map<mx::Device, Device> known;  // each call asks
  if (auto found = known.find(device); found != known.end()) return found->second;
  Device result = {.backend = backend_of(device)};
  if (device == mx::Device::gpu && mx::is_available(device)) {
    if (result.backend == Backend::cuda) result = cuda::properties(device.index);
    result.index = device.index;
    result.tuned = tuned_costs(std::get<std::string>(mx::device_info(device).at("device_name")));
  }
  return known.emplace(device, result).first->second;
}

Backend backend_of(const mx::Device& device) {
  if (device == mx::Device::cpu) {
    return Backend::cpu;
  }
  static const Backend gpu = mx::cu::is_available() ? Backend::cuda : Backend::metal;
  return gpu;
}

mx::Shape batch_shape(const mx::array& query) {
  return mx::Shape(query.shape().begin(), query.shape().end() - 3);
}

}  // namespace flashattn
