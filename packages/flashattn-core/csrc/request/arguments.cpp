// Turns a call's arguments into a primitive's inputs, and finds inputs by name.
#include "arguments.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "../call/spans.h"
#include "../cuda/encode.h"
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

std::vector<mx::array> primitive_inputs(const Arguments& arguments, Backend backend, const mx::Stream& stream) {
  std::vector<mx::array> inputs;
  for (const InputRule& rule : kInputRules) {
    if (const auto& given = arguments.inputs[index(rule.input)]) {
      inputs.push_back(as_kernels_read_it(*given, rule.dtype, backend, stream));
    }
  }
  return inputs;
}

Inputs::Inputs(const std::vector<mx::array>& primitive_inputs, const Present& present) {
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

CallShape call_shape(const Inputs& inputs, const Options& options, Backend backend, Precision precision) {
  gpu::Device device = backend == Backend::cuda ? cuda::device() : gpu::Device{.multiprocessors = 0};
  const mx::array& query = inputs.query();
  int query_len = query.shape(kRow), key_len = inputs.key().shape(kRow);
  return {.query_len = query_len,
          .key_len = key_len,
          .head_dim = query.shape(kColumn),
          .value_dim = columns_of(inputs.value(), options),
          .bits = options.bits,
          .element_size = static_cast<int>(query.itemsize()),
          .compute_capability = device.compute_capability,
          .multiprocessors = device.multiprocessors,
          .heads = batch_size(query) * query.shape(kHead),
          .pairs = visible_pairs(options.causal, options.window, query_len, key_len),
          .is_even = !inputs[Input::visible] && !inputs[Input::bias] &&
                     sees_evenly(options.causal, options.window, query_len, key_len),
          .precision = precision};
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

int64_t batch_size(const mx::array& query) {
  return std::accumulate(query.shape().begin(), query.shape().end() - 3, int64_t{1}, std::multiplies<>());
}

}  // namespace flashattn
