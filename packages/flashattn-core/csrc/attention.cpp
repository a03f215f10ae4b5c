#include "attention.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
#include <cmath>
#include <sstream>

#include "cpu/attention.h"
#include "cpu/backward.h"
#include "cpu/threads.h"
#include "metal/encode.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/backend/metal/metal.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "params.h"

namespace flashattn {
namespace {

constexpr int kMaxHeadDim = 512;
constexpr int kMaxPositions = 2147483647 - 1024;    // positions are int32, and loops run up to one tile further
constexpr int kHead = -3, kRow = -2, kColumn = -1;  // axes of (*B, H, L, D)

using InputPointers = std::array<const mx::array*, kNumOptionalInputs>;

constexpr std::array<const char*, kNumOptionalInputs> kInputNames = {
    "mask (key range start)", "mask (key range stop)", "mask (tree)", "mask", "mask", "sinks", "alibi_slopes"};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "[flash_attention] ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Of out and lse.
std::vector<mx::Shape> shapes_of_outputs(const mx::array& query, const mx::array& value) {
  mx::Shape lse(query.shape().begin(), query.shape().end() - 1);
  mx::Shape out = lse;
  out.push_back(value.shape(kColumn));
  return {out, lse};
}

mx::Shape batch_shape(const mx::array& query) {
  return mx::Shape(query.shape().begin(), query.shape().end() - 3);
}

// --- Checks --------------------------------------------------------------------------------------------

void check_tensors(const mx::array& query, const mx::array& key, const mx::array& value) {
  const std::pair<const char*, const mx::array*> tensors[] = {{"query", &query}, {"key", &key}, {"value", &value}};
  for (auto [name, tensor] : tensors) {
    if (tensor->ndim() < 3 || tensor->ndim() > 3 + kMaxBatchDims) {
      fail(name, " has shape ", tensor->shape(), ", expected (*B, heads, length, dim): 3 to ", 3 + kMaxBatchDims,
           " dimensions");
    }
    if (tensor->dtype() != mx::float32 && tensor->dtype() != mx::float16 && tensor->dtype() != mx::bfloat16) {
      fail(name, " is ", tensor->dtype(), ", expected float32, float16 or bfloat16");
    }
    if (tensor->dtype() != query.dtype()) {
      fail(name, " is ", tensor->dtype(), ", expected query's ", query.dtype());
    }
    if (tensor->ndim() != query.ndim() || batch_shape(*tensor) != batch_shape(query)) {
      fail(name, " has shape ", tensor->shape(), ", expected the leading dimensions of query, ", query.shape());
    }
  }
  if (query.shape(kColumn) < 1 || query.shape(kColumn) > kMaxHeadDim) {
    fail("query has head_dim ", query.shape(kColumn), ", expected 1 to ", kMaxHeadDim);
  }
  if (key.shape(kColumn) != query.shape(kColumn)) {
    fail("key has head_dim ", key.shape(kColumn), ", expected query's ", query.shape(kColumn));
  }
  if (value.shape(kColumn) < 1 || value.shape(kColumn) > kMaxHeadDim) {
    fail("value has head_dim ", value.shape(kColumn), ", expected 1 to ", kMaxHeadDim);
  }
  if (value.shape(kHead) != key.shape(kHead)) {
    fail("value has ", value.shape(kHead), " heads, expected key's ", key.shape(kHead));
  }
  if (value.shape(kRow) != key.shape(kRow)) {
    fail("value has length ", value.shape(kRow), ", expected key's ", key.shape(kRow));
  }
  if (int64_t{query.shape(kRow)} + key.shape(kRow) > kMaxPositions) {
    fail("query and key have lengths ", query.shape(kRow), " and ", key.shape(kRow), ", expected at most ",
         kMaxPositions, " together");
  }
  if (key.shape(kHead) < 1 || query.shape(kHead) % key.shape(kHead) != 0) {
    fail("key has ", key.shape(kHead), " heads, which does not divide query's ", query.shape(kHead));
  }
}

// Whether `input` broadcasts to `target` when both are aligned at the last dimension.
bool broadcasts(const mx::Shape& input, const mx::Shape& target) {
  if (input.size() > target.size()) {
    return false;
  }
  for (size_t i = 1; i <= input.size(); ++i) {
    int n = input[input.size() - i];
    if (n != 1 && n != target[target.size() - i]) {
      return false;
    }
  }
  return true;
}

// The shape that an optional input broadcasts to.
mx::Shape input_target(Input input, const mx::array& query, const mx::array& key, const mx::array& given) {
  mx::Shape target = batch_shape(query);
  switch (input) {
    case kKeyStart:
    case kKeyStop: break;
    case kTree:
      target.push_back(given.shape(-2));
      target.push_back((given.shape(-2) + 31) / 32);
      break;
    case kVisible:
    case kBias: target.insert(target.end(), {query.shape(kHead), query.shape(kRow), key.shape(kRow)}); break;
    case kSinks:
    case kAlibiSlopes: target.push_back(query.shape(kHead)); break;
    case kNumOptionalInputs: break;
  }
  return target;
}

void check_shapes(const mx::array& query, const mx::array& key, const InputPointers& optional_inputs) {
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    const mx::array* given = optional_inputs[i];
    if (!given) {
      continue;
    }
    if (i == kTree && (given->ndim() < 2 || given->shape(-2) > key.shape(kRow))) {
      fail("mask (tree) has shape ", given->shape(), ", expected (*B, T, T) with T at most key's length, ",
           key.shape(kRow));
    }
    mx::Shape target = input_target(static_cast<Input>(i), query, key, *given);
    if (!broadcasts(given->shape(), target)) {
      fail(kInputNames[i], " has shape ", given->shape(), ", expected one that broadcasts to ", target);
    }
  }
}

void check_options(const Options& options) {
  if (options.scale && !std::isfinite(*options.scale)) {
    fail("scale is ", *options.scale, ", expected a finite number");
  }
  if (!std::isfinite(options.softcap) || options.softcap < 0) {
    fail("softcap is ", options.softcap, ", expected a finite number above 0");
  }
  if (options.window < 0) {
    fail("window is ", options.window, ", expected at least 1");
  }
}

// As in mx.fast.scaled_dot_product_attention: precision may rise to the query's dtype, not fall.
void check_promotes(const char* name, const mx::array& given, mx::Dtype dtype) {
  if (mx::promote_types(given.dtype(), dtype) != dtype) {
    fail(name, " is ", given.dtype(), ", expected a dtype that promotes to query's ", dtype);
  }
}

void check_dtypes(const mx::array& query, const OptionalInputs& given) {
  const auto expect = [&](Input input, mx::Dtype dtype) {
    if (given[input] && given[input]->dtype() != dtype) {
      fail(kInputNames[input], " is ", given[input]->dtype(), ", expected ", dtype);
    }
  };
  expect(kKeyStart, mx::int32);
  expect(kKeyStop, mx::int32);
  expect(kTree, mx::uint32);
  expect(kVisible, mx::bool_);
  for (Input input : {kBias, kSinks}) {
    if (given[input]) {
      check_promotes(kInputNames[input], *given[input], query.dtype());
    }
  }
  if (given[kAlibiSlopes] && !mx::issubdtype(given[kAlibiSlopes]->dtype(), mx::floating)) {
    fail("alibi_slopes is ", given[kAlibiSlopes]->dtype(), ", expected a floating dtype");
  }
  for (Input input : {kSinks, kAlibiSlopes}) {
    if (given[input] && given[input]->shape() != mx::Shape{query.shape(kHead)}) {
      fail(kInputNames[input], " has shape ", given[input]->shape(), ", expected (", query.shape(kHead),
           "): one number a query head");
    }
  }
}

void check(const mx::array& query, const mx::array& key, const mx::array& value, const OptionalInputs& given,
           const Options& options) {
  check_tensors(query, key, value);
  check_options(options);
  check_dtypes(query, given);
  InputPointers pointers = {};
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    pointers[i] = given[i] ? &*given[i] : nullptr;
  }
  check_shapes(query, key, pointers);
}

Backend backend_of(const mx::Stream& stream) {
  return stream.device == mx::Device::cpu ? Backend::cpu : Backend::metal;
}

Choice choose_for(Backend backend, const mx::array& query, const mx::array& key, const mx::array& value,
                  const Options& options) {
  CallShape shape = {query.shape(kRow), key.shape(kRow), query.shape(kColumn), value.shape(kColumn)};
  return choose(backend, shape, options.kernel);
}

Kernel kernel_of(const Choice& choice) {
  if (!choice.kernel) {
    throw NoKernelError("[flash_attention] " + choice.reason);
  }
  return *choice.kernel;
}

// Whether the gradient has a kernel there.
void check_backward(Backend backend, const mx::array& query, const mx::array& value) {
  int dim = std::max(query.shape(kColumn), value.shape(kColumn));
  if (backend == Backend::metal && dim > metal::kMaxBackwardDim) {
    throw NoKernelError("[flash_attention] metal_backward_dq and metal_backward_dkv take a head_dim up to " +
                        std::to_string(metal::kMaxBackwardDim) + ", found " + std::to_string(dim));
  }
}

// --- From arguments to what the primitive takes ----------------------------------------------------------

struct PrimitiveInputs {
  std::vector<mx::array> arrays;  // query, key, value, and the optional inputs that are there
  std::array<bool, kNumOptionalInputs> present = {};
};

PrimitiveInputs primitive_inputs(const mx::array& query, const mx::array& key, const mx::array& value,
                                 const OptionalInputs& given, const mx::Stream& stream) {
  PrimitiveInputs inputs = {{query, key, value}};
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    inputs.present[i] = given[i].has_value();
    if (!inputs.present[i]) {
      continue;
    }
    mx::array input = *given[i];
    if (i == kSinks || i == kAlibiSlopes) {
      input = mx::astype(input, mx::float32, stream);
    } else if (i == kBias && !mx::issubdtype(input.dtype(), mx::floating)) {
      input = mx::astype(input, query.dtype(), stream);
    }
    inputs.arrays.push_back(std::move(input));
  }
  return inputs;
}

InputPointers optional_inputs_of(const std::vector<mx::array>& inputs,
                                 const std::array<bool, kNumOptionalInputs>& present) {
  InputPointers pointers = {};
  size_t next = 3;
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    pointers[i] = present[i] ? &inputs[next++] : nullptr;
  }
  return pointers;
}

// --- From arrays to the backend's plain structs ----------------------------------------------------------

// Strides of an array whose last `axes` dimensions are the given fields and whose other dimensions are the
// batch's. Missing dimensions and those of size 1 get stride 0: they are broadcast.
Strides strides_of(const mx::array& a, int batch_dims, std::initializer_list<int64_t Strides::*> axes) {
  Strides result = {};
  int ndim = static_cast<int>(a.ndim());
  const auto stride = [&](int axis) { return axis < 0 || a.shape(axis) == 1 ? 0 : a.strides(axis); };
  int axis = ndim - static_cast<int>(axes.size());
  for (int d = 0; d < batch_dims; ++d) {
    result.batch[d] = stride(axis - batch_dims + d);
  }
  for (auto field : axes) {
    result.*field = stride(axis++);
  }
  return result;
}

AttentionParams make_params(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs,
                            const InputPointers& optional_inputs, const Options& options) {
  const mx::array &query = inputs[0], &key = inputs[1], &value = inputs[2];
  AttentionParams params = {};
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
  params.value_dim = value.shape(kColumn);
  // Not before now: under shapeless compilation D is not known earlier.
  params.scale = options.scale.value_or(1 / std::sqrt(static_cast<float>(params.head_dim)));
  params.softcap = options.softcap;
  params.causal = options.causal;
  params.window = options.window;
  params.tree_size = optional_inputs[kTree] ? optional_inputs[kTree]->shape(-2) : 0;

  const auto strides = [&](const mx::array* a, std::initializer_list<int64_t Strides::*> axes) {
    return a ? strides_of(*a, params.batch_dims, axes) : Strides{};
  };
  constexpr auto head = &Strides::head, row = &Strides::row, column = &Strides::column;
  params.query = strides(&query, {head, row, column});
  params.key = strides(&key, {head, row, column});
  params.value = strides(&value, {head, row, column});
  params.out = strides(&outputs[0], {head, row, column});
  params.lse = strides(&outputs[1], {head, row});
  params.key_start = strides(optional_inputs[kKeyStart], {});
  params.key_stop = strides(optional_inputs[kKeyStop], {});
  params.tree = strides(optional_inputs[kTree], {row, column});
  params.visible = strides(optional_inputs[kVisible], {head, row, column});
  params.bias = strides(optional_inputs[kBias], {head, row, column});
  params.sinks = strides(optional_inputs[kSinks], {head});
  params.alibi_slopes = strides(optional_inputs[kAlibiSlopes], {head});
  return params;
}

// `Dtype` is cpu::Dtype or metal::Dtype.
template <typename Dtype>
Dtype backend_dtype(mx::Dtype dtype) {
  return dtype == mx::float32 ? Dtype::float32 : dtype == mx::float16 ? Dtype::float16 : Dtype::bfloat16;
}

template <typename T>
const T* data_or_null(const mx::array* a) {
  return a ? a->data<T>() : nullptr;
}

// What the forward and the backward pass read.
void bind_inputs(metal::Work& work, metal::Call& call, const std::vector<mx::array>& inputs,
                 const InputPointers& optional_inputs) {
  if (optional_inputs[kBias]) {
    call.bias_dtype = backend_dtype<metal::Dtype>(optional_inputs[kBias]->dtype());
  }
  work.arrays[metal::kQuery] = inputs[0];
  work.arrays[metal::kKey] = inputs[1];
  work.arrays[metal::kValue] = inputs[2];
  static_assert(metal::kAlibiSlopes - metal::kKeyStart == int{kAlibiSlopes}, "the same order in both");
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    if (optional_inputs[i]) {
      call.present[metal::kKeyStart + i] = true;
      work.arrays[metal::kKeyStart + i] = *optional_inputs[i];
    }
  }
}

metal::Work make_work(Kernel kernel, const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs,
                      const InputPointers& optional_inputs, const Options& options) {
  metal::Call call = {.params = make_params(inputs, outputs, optional_inputs, options),
                      .dtype = backend_dtype<metal::Dtype>(inputs[0].dtype()),
                      .bias_dtype = metal::Dtype::float32};
  metal::Work work;
  bind_inputs(work, call, inputs, optional_inputs);
  work.arrays[metal::kOut] = outputs[0];
  work.arrays[metal::kLse] = outputs[1];
  work.params = call.params;
  work.launches = metal::launches(kernel, call);
  return work;
}

// `gradients`: of query, key, value, and delta if it is wanted.
metal::Work make_backward_work(const std::vector<mx::array>& inputs, const InputPointers& optional_inputs,
                               const Options& options, const mx::array& out, const mx::array& lse,
                               const mx::array& dout, const std::optional<mx::array>& dlse,
                               const std::vector<mx::array>& gradients) {
  metal::Call call = {.params = make_params(inputs, {out, lse}, optional_inputs, options),
                      .dtype = backend_dtype<metal::Dtype>(inputs[0].dtype()),
                      .bias_dtype = metal::Dtype::float32};
  metal::Work work;
  bind_inputs(work, call, inputs, optional_inputs);
  const auto bind = [&](metal::Binding binding, const mx::array& array, Strides& strides) {
    constexpr auto head = &Strides::head, row = &Strides::row, column = &Strides::column;
    int batch_dims = call.params.batch_dims;
    bool has_columns = static_cast<int>(array.ndim()) == batch_dims + 3;
    strides =
        has_columns ? strides_of(array, batch_dims, {head, row, column}) : strides_of(array, batch_dims, {head, row});
    work.arrays[binding] = array;
  };
  work.arrays[metal::kSavedOut] = out;
  work.arrays[metal::kSavedLse] = lse;
  bind(metal::kDout, dout, work.backward.dout);
  if (dlse) {
    call.present[metal::kDlse] = true;
    bind(metal::kDlse, *dlse, work.backward.dlse);
  }
  bind(metal::kDq, gradients[0], work.backward.dq);
  bind(metal::kDk, gradients[1], work.backward.dk);
  bind(metal::kDv, gradients[2], work.backward.dv);
  if (gradients.size() > 3) {
    work.arrays[metal::kDelta] = gradients[3];
  }
  work.params = call.params;
  work.launches = metal::backward_launches(call, work.backward);
  return work;
}

std::array<std::atomic<uint64_t>, kNumKernels> call_counts;

void count(Kernel kernel) {
  call_counts[static_cast<int>(kernel)].fetch_add(1, std::memory_order_relaxed);
}

void allocate(std::vector<mx::array>& outputs) {
  for (mx::array& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

}  // namespace

// --- The op ------------------------------------------------------------------------------------------------

Choice plan(const mx::array& query, const mx::array& key, const mx::array& value, const OptionalInputs& given,
            const Options& options, Backend backend) {
  check(query, key, value, given, options);
  return choose_for(backend, query, key, value, options);
}

std::vector<mx::array> attention(const mx::array& query, const mx::array& key, const mx::array& value,
                                 const OptionalInputs& given, const Options& options,
                                 mx::StreamOrDevice stream_or_device) {
  mx::Stream stream = mx::to_stream(stream_or_device);
  kernel_of(plan(query, key, value, given, options, backend_of(stream)));
  if (stream.device == mx::Device::cpu) {
    cpu::initialise();  // nonsense in the environment fails here, where it can be caught
  } else if (!mx::metal::is_available()) {
    throw NoKernelError("[flash_attention] this MLX has no Metal");
  }
  PrimitiveInputs inputs = primitive_inputs(query, key, value, given, stream);
  return mx::array::make_arrays(shapes_of_outputs(query, value), {query.dtype(), mx::float32},
                                std::make_shared<FlashAttention>(stream, options, inputs.present),
                                std::move(inputs.arrays));
}

metal::Work metal_work(const mx::array& query, const mx::array& key, const mx::array& value,
                       const OptionalInputs& given, const Options& options) {
  Kernel kernel = kernel_of(plan(query, key, value, given, options, Backend::metal));
  PrimitiveInputs inputs = primitive_inputs(query, key, value, given, mx::to_stream({}));
  mx::eval(inputs.arrays);
  std::vector<mx::array> outputs;
  for (const mx::Shape& shape : shapes_of_outputs(query, value)) {
    outputs.emplace_back(shape, outputs.empty() ? query.dtype() : mx::float32, nullptr, std::vector<mx::array>{});
  }
  return make_work(kernel, inputs.arrays, outputs, optional_inputs_of(inputs.arrays, inputs.present), options);
}

metal::Work metal_backward_work(const mx::array& query, const mx::array& key, const mx::array& value,
                                const OptionalInputs& given, const Options& options, const mx::array& out,
                                const mx::array& lse, const mx::array& dout, const std::optional<mx::array>& dlse) {
  plan(query, key, value, given, options, Backend::metal);
  check_backward(Backend::metal, query, value);
  PrimitiveInputs inputs = primitive_inputs(query, key, value, given, mx::to_stream({}));
  std::vector<mx::array> evaluated = inputs.arrays;
  evaluated.insert(evaluated.end(), {out, lse, dout});
  if (dlse) {
    evaluated.push_back(*dlse);
  }
  mx::eval(evaluated);
  const auto like = [](const mx::array& array) {  // not allocated
    return mx::array(array.shape(), array.dtype(), nullptr, std::vector<mx::array>{});
  };
  return make_backward_work(inputs.arrays, optional_inputs_of(inputs.arrays, inputs.present), options, out, lse, dout,
                            dlse, {like(query), like(key), like(value)});
}

std::array<uint64_t, kNumKernels> calls() {
  std::array<uint64_t, kNumKernels> result;
  for (int i = 0; i < kNumKernels; ++i) {
    result[i] = call_counts[i].load(std::memory_order_relaxed);
  }
  return result;
}

void reset_calls() {
  for (auto& count : call_counts) {
    count.store(0, std::memory_order_relaxed);
  }
}

// --- The primitive -----------------------------------------------------------------------------------------

// A sink's weight in a row is exp(sink - lse), and it brings no value: its gradient is -weight * delta, over all rows.
static mx::array sinks_gradient(const mx::array& sinks, const mx::array& lse, const mx::array& delta,
                                const mx::Stream& stream) {
  mx::array sees_nothing = mx::isneginf(lse, stream);
  mx::array logits = mx::subtract(mx::expand_dims(sinks, -1, stream), lse, stream);
  mx::array weights = mx::where(sees_nothing, mx::array(0.0f), mx::exp(logits, stream), stream);
  mx::array gradient = mx::negative(mx::sum(mx::multiply(weights, delta, stream), -1, false, stream), stream);
  std::vector<int> broadcast;  // the leading dimensions that sinks do not have, or have once
  int missing = static_cast<int>(gradient.ndim() - sinks.ndim());
  for (int axis = 0; axis < static_cast<int>(gradient.ndim()); ++axis) {
    if (axis < missing || (sinks.shape(axis - missing) == 1 && gradient.shape(axis) != 1)) {
      broadcast.push_back(axis);
    }
  }
  return mx::reshape(mx::sum(gradient, broadcast, false, stream), sinks.shape(), stream);
}

InputPointers FlashAttention::optional_inputs(const std::vector<mx::array>& inputs) const {
  return optional_inputs_of(inputs, present_);
}

// MLX's CPU allocator returns large arrays to the system, so that each output is new memory: in pages of 4 KB its
// first writing costs 2 % of a long prefill.
static void prefer_huge_pages(void* data, size_t size) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / kHugePage * kHugePage;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: the system may decline
  }
#else
  (void)data;
  (void)size;
#endif
}

// What the forward and the backward pass have in common; `outputs` are out and lse.
static cpu::AttentionArgs cpu_args(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs,
                                   const InputPointers& optional, const Options& options) {
  // The forward pass writes out and lse, the backward pass reads them.
  return {
      .params = make_params(inputs, outputs, optional, options),
      .dtype = backend_dtype<cpu::Dtype>(inputs[0].dtype()),
      .bias_dtype = optional[kBias] ? backend_dtype<cpu::Dtype>(optional[kBias]->dtype()) : cpu::Dtype::float32,
      .query = inputs[0].data<void>(),
      .key = inputs[1].data<void>(),
      .value = inputs[2].data<void>(),
      .out = const_cast<void*>(outputs[0].data<void>()),
      .lse = const_cast<float*>(outputs[1].data<float>()),
      .visible = data_or_null<bool>(optional[kVisible]),
      .bias = data_or_null<void>(optional[kBias]),
      .key_start = data_or_null<int32_t>(optional[kKeyStart]),
      .key_stop = data_or_null<int32_t>(optional[kKeyStop]),
      .tree = data_or_null<uint32_t>(optional[kTree]),
      .sinks = data_or_null<float>(optional[kSinks]),
      .alibi_slopes = data_or_null<float>(optional[kAlibiSlopes]),
  };
}

static mx::cpu::CommandEncoder& encoder_for(const mx::Stream& stream, const std::vector<mx::array>& inputs,
                                            std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (const mx::array& input : inputs) {
    encoder.set_input_array(input);
  }
  for (mx::array& output : outputs) {
    encoder.set_output_array(output);
  }
  return encoder;
}

void FlashAttention::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(outputs);
  for (mx::array& output : outputs) {
    prefer_huge_pages(output.data<void>(), output.nbytes());
  }
  cpu::AttentionArgs args = cpu_args(inputs, outputs, optional_inputs(inputs), options_);
  Kernel kernel = kernel_of(choose_for(Backend::cpu, inputs[0], inputs[1], inputs[2], options_));
  count(kernel);

  auto& encoder = encoder_for(stream(), inputs, outputs);
  if (outputs[0].size() == 0) {
    return;
  }
  encoder.dispatch([kernel, args, expected = cpu::ExpectedJob()] {
    kernel == Kernel::cpu_decode ? cpu::decode(args) : cpu::prefill(args);
  });
}

void FlashAttention::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(outputs);
  Kernel kernel = kernel_of(choose_for(Backend::metal, inputs[0], inputs[1], inputs[2], options_));
  count(kernel);
  if (outputs[0].size() == 0) {
    return;
  }
  metal::encode(make_work(kernel, inputs, outputs, optional_inputs(inputs), options_), stream());
}

std::vector<mx::array> FlashAttention::jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                           const std::vector<int>&) {
  throw std::invalid_argument("[flash_attention] forward-mode differentiation (jvp) is not supported");
}

std::vector<mx::array> FlashAttention::vjp(const std::vector<mx::array>& primals,
                                           const std::vector<mx::array>& cotangents, const std::vector<int>& argnums,
                                           const std::vector<mx::array>& outputs) {
  check_backward(backend_of(stream()), primals[0], primals[2]);
  const mx::array* sinks = optional_inputs(primals)[kSinks];
  for (int argument : argnums) {
    if (argument >= 3 && &primals[argument] != sinks) {
      fail("there is no gradient of masks and alibi_slopes, only of query, key, value and sinks");
    }
  }
  std::vector<mx::array> inputs = primals;
  inputs.insert(inputs.end(), outputs.begin(), outputs.end());
  inputs.insert(inputs.end(), cotangents.begin(), cotangents.end());
  const mx::array &query = primals[0], &key = primals[1], &value = primals[2];
  auto gradients =
      mx::array::make_arrays({query.shape(), key.shape(), value.shape(), outputs[1].shape()},
                             {query.dtype(), query.dtype(), query.dtype(), mx::float32},
                             std::make_shared<FlashAttentionGradient>(stream(), options_, present_), std::move(inputs));
  std::vector<mx::array> result;
  for (int argument : argnums) {
    result.push_back(argument < 3 ? gradients[argument] : sinks_gradient(*sinks, outputs[1], gradients[3], stream()));
  }
  return result;
}

// The inputs with the mapped axis as the first batch dimension. `own_dims[i]` of input i's dimensions are behind the
// batch's; those that are `whole` must have the axis, the others broadcast, so an unmapped one stays as it is.
static std::vector<mx::array> mapped_inputs(const std::vector<mx::array>& inputs, const std::vector<int>& axes,
                                            const std::vector<int>& own_dims, const std::vector<bool>& whole,
                                            const mx::Stream& stream) {
  int size = 1;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) {
      size = inputs[i].shape(axes[i]);
    }
  }
  int batch_dims = static_cast<int>(inputs[0].ndim()) - (axes[0] >= 0 ? 1 : 0) - own_dims[0];
  if (batch_dims + 1 > kMaxBatchDims) {
    fail("vmap makes ", batch_dims + 1, " batch dimensions, expected at most ", kMaxBatchDims);
  }
  std::vector<mx::array> mapped;
  for (size_t i = 0; i < inputs.size(); ++i) {
    mx::array input = inputs[i];
    if (axes[i] >= 0) {
      input = mx::moveaxis(input, axes[i], 0, stream);
      // Dimensions that the input leaves to broadcasting come between the mapped one and its own.
      std::vector<int> missing;
      for (int n = static_cast<int>(input.ndim()); n < 1 + batch_dims + own_dims[i]; ++n) {
        missing.push_back(1 + static_cast<int>(missing.size()));
      }
      if (!missing.empty()) {
        input = mx::expand_dims(input, missing, stream);
      }
    } else if (whole[i]) {
      mx::Shape shape = input.shape();
      shape.insert(shape.begin(), size);
      input = mx::broadcast_to(input, shape, stream);
    }
    mapped.push_back(std::move(input));
  }
  return mapped;
}

// Of query, key, value and the optional inputs that there are.
static std::vector<int> own_dims_of(const std::array<bool, kNumOptionalInputs>& present) {
  constexpr std::array<int, kNumOptionalInputs> kOwnDims = {0, 0, 2, 3, 3, 1, 1};
  std::vector<int> own_dims = {3, 3, 3};
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    if (present[i]) {
      own_dims.push_back(kOwnDims[i]);
    }
  }
  return own_dims;
}

std::pair<std::vector<mx::array>, std::vector<int>> FlashAttention::vmap(const std::vector<mx::array>& inputs,
                                                                         const std::vector<int>& axes) {
  std::vector<bool> whole(inputs.size(), false);
  std::fill_n(whole.begin(), 3, true);
  std::vector<mx::array> mapped = mapped_inputs(inputs, axes, own_dims_of(present_), whole, stream());
  std::vector<mx::Shape> shapes = shapes_of_outputs(mapped[0], mapped[2]);
  return {mx::array::make_arrays(std::move(shapes), {mapped[0].dtype(), mx::float32},
                                 std::make_shared<FlashAttention>(stream(), options_, present_), std::move(mapped)),
          {0, 0}};
}

bool FlashAttention::is_equivalent(const mx::Primitive& other) const {
  const auto& flash = static_cast<const FlashAttention&>(other);
  return options_ == flash.options_ && present_ == flash.present_;
}

std::vector<mx::Shape> FlashAttention::output_shapes(const std::vector<mx::array>& inputs) {
  // Also called with new shapes by shapeless compilation, which has passed no check yet.
  check_tensors(inputs[0], inputs[1], inputs[2]);
  check_shapes(inputs[0], inputs[1], optional_inputs(inputs));
  kernel_of(choose_for(backend_of(stream()), inputs[0], inputs[1], inputs[2], options_));
  return shapes_of_outputs(inputs[0], inputs[2]);
}

// --- Its gradient ------------------------------------------------------------------------------------------

// Behind the forward pass's inputs: out, lse, and what comes back for them.
constexpr int kGradientInputs = 4;

void FlashAttentionGradient::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(outputs);
  std::vector<mx::array> forward_inputs(inputs.begin(), inputs.end() - kGradientInputs);
  std::vector<mx::array> forward_outputs(inputs.end() - kGradientInputs, inputs.end() - 2);
  const mx::array &out_gradient = inputs[inputs.size() - 2], &lse_gradient = inputs[inputs.size() - 1];
  cpu::BackwardArgs args = {
      .forward = cpu_args(forward_inputs, forward_outputs, optional_inputs_of(forward_inputs, present_), options_),
      .out_gradient = out_gradient.data<void>(),
      .lse_gradient = lse_gradient.data<float>(),
      .out_gradient_strides = {},
      .lse_gradient_strides = {},
      .query_gradient = outputs[0].data<void>(),
      .key_gradient = outputs[1].data<void>(),
      .value_gradient = outputs[2].data<void>(),
      .delta = outputs[3].data<float>(),
  };
  int batch_dims = args.forward.params.batch_dims;
  args.out_gradient_strides = strides_of(out_gradient, batch_dims, {&Strides::head, &Strides::row, &Strides::column});
  args.lse_gradient_strides = strides_of(lse_gradient, batch_dims, {&Strides::head, &Strides::row});
  count(Kernel::cpu_backward);
  encoder_for(stream(), inputs, outputs).dispatch([args] { cpu::backward(args); });
}

void FlashAttentionGradient::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(outputs);
  std::vector<mx::array> forward_inputs(inputs.begin(), inputs.end() - kGradientInputs);
  const mx::array* behind = &inputs[forward_inputs.size()];
  count(Kernel::metal_backward_dq);
  count(Kernel::metal_backward_dkv);
  metal::encode(make_backward_work(forward_inputs, optional_inputs_of(forward_inputs, present_), options_, behind[0],
                                   behind[1], behind[2], behind[3], outputs),
                stream());
}

std::vector<mx::array> FlashAttentionGradient::vjp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                                   const std::vector<int>&, const std::vector<mx::array>&) {
  throw std::invalid_argument("[flash_attention] second derivatives are not supported");
}

std::vector<mx::array> FlashAttentionGradient::jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                                   const std::vector<int>&) {
  throw std::invalid_argument("[flash_attention] second derivatives are not supported");
}

std::pair<std::vector<mx::array>, std::vector<int>> FlashAttentionGradient::vmap(const std::vector<mx::array>& inputs,
                                                                                 const std::vector<int>& axes) {
  std::vector<int> own_dims = own_dims_of(present_);
  own_dims.insert(own_dims.end(), {3, 2, 3, 2});  // out, lse, and their gradients
  std::vector<bool> whole(inputs.size(), false);
  std::fill_n(whole.begin(), 3, true);
  std::fill_n(whole.end() - kGradientInputs, kGradientInputs, true);
  std::vector<mx::array> mapped = mapped_inputs(inputs, axes, own_dims, whole, stream());
  mx::Dtype dtype = mapped[0].dtype();
  std::vector<mx::Shape> shapes = output_shapes(mapped);
  return {
      mx::array::make_arrays(std::move(shapes), {dtype, dtype, dtype, mx::float32},
                             std::make_shared<FlashAttentionGradient>(stream(), options_, present_), std::move(mapped)),
      {0, 0, 0, 0}};
}

bool FlashAttentionGradient::is_equivalent(const mx::Primitive& other) const {
  const auto& gradient = static_cast<const FlashAttentionGradient&>(other);
  return options_ == gradient.options_ && present_ == gradient.present_;
}

std::vector<mx::Shape> FlashAttentionGradient::output_shapes(const std::vector<mx::array>& inputs) {
  const mx::array& lse = inputs[inputs.size() - 3];
  return {inputs[0].shape(), inputs[1].shape(), inputs[2].shape(), lse.shape()};
}

}  // namespace flashattn
