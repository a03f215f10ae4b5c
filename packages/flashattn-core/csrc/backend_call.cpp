// Arrays to pointers, shapes and strides, for each backend and each pass.
#include "backend_call.h"

#include <cmath>

#include "params.h"

namespace flashattn {
namespace {

constexpr auto head = &Strides::head, row = &Strides::row, column = &Strides::column;

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

AttentionParams make_params(const Inputs& inputs, const Options& options, const mx::array& out, const mx::array& lse) {
  const mx::array &query = inputs.query, &key = inputs.key, &value = inputs.value;
  const auto& optional = inputs.optional;
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
  params.value_dim = columns_of(value, options);
  // Not before now: under shapeless compilation D is not known earlier.
  params.scale = options.scale.value_or(1 / std::sqrt(static_cast<float>(params.head_dim)));
  params.softcap = options.softcap;
  params.causal = options.causal;
  params.window = options.window;
  params.tree_size = optional[kTree] ? optional[kTree]->shape(-2) : 0;

  const auto strides = [&](const mx::array* a, std::initializer_list<int64_t Strides::*> axes) {
    return a ? strides_of(*a, params.batch_dims, axes) : Strides{};
  };
  params.query = strides(&query, {head, row, column});
  params.key = strides(&key, {head, row, column});
  params.value = strides(&value, {head, row, column});
  params.out = strides(&out, {head, row, column});
  params.lse = strides(&lse, {head, row});
  params.key_start = strides(optional[kKeyStart], {});
  params.key_stop = strides(optional[kKeyStop], {});
  params.tree = strides(optional[kTree], {row, column});
  params.visible = strides(optional[kVisible], {head, row, column});
  params.bias = strides(optional[kBias], {head, row, column});
  params.sinks = strides(optional[kSinks], {head});
  params.alibi_slopes = strides(optional[kAlibiSlopes], {head});
  return params;
}

QuantParams make_quant_params(const Inputs& inputs, const Options& options) {
  QuantParams quant = {};
  if (options.bits != 0) {
    int batch_dims = static_cast<int>(inputs.query.ndim()) - 3;
    const auto strides = [&](Input input) {
      return strides_of(*inputs.optional[input], batch_dims, {head, row, column});
    };
    quant = {options.bits,        options.group_size,    strides(kKeyScales),
             strides(kKeyBiases), strides(kValueScales), strides(kValueBiases)};
  }
  return quant;
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

// Query, key, value and the optional inputs, which the forward and the backward pass read.
std::pair<metal::Work, metal::Call> metal_inputs(const Inputs& inputs, const Options& options, const mx::array& out,
                                                 const mx::array& lse) {
  const auto dtype_of = [](const mx::array* a) {
    return a ? backend_dtype<metal::Dtype>(a->dtype()) : metal::Dtype::float32;
  };
  metal::Call call = {.params = make_params(inputs, options, out, lse),
                      .dtype = dtype_of(&inputs.query),
                      .bias_dtype = dtype_of(inputs.optional[kBias]),
                      .quant = make_quant_params(inputs, options),
                      .group_dtype = dtype_of(inputs.optional[kKeyScales])};
  metal::Work work;
  work.params = call.params;
  work.quant = call.quant;
  work.arrays[metal::kQuery] = inputs.query;
  work.arrays[metal::kKey] = inputs.key;
  work.arrays[metal::kValue] = inputs.value;
  static_assert(metal::kAlibiSlopes - metal::kKeyStart == int{kAlibiSlopes}, "the same order in both");
  static_assert(metal::kValueBiases - metal::kKeyScales == kValueBiases - kKeyScales, "here, too");
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    if (inputs.optional[i]) {
      int binding = i < kKeyScales ? metal::kKeyStart + i : metal::kKeyScales + i - kKeyScales;
      call.present[binding] = true;
      work.arrays[binding] = *inputs.optional[i];
    }
  }
  return {std::move(work), call};
}

}  // namespace

cpu::AttentionArgs cpu_forward(const Inputs& inputs, const Options& options, const mx::array& out,
                               const mx::array& lse) {
  const auto& optional = inputs.optional;
  return {
      .params = make_params(inputs, options, out, lse),
      .dtype = backend_dtype<cpu::Dtype>(inputs.query.dtype()),
      .bias_dtype = optional[kBias] ? backend_dtype<cpu::Dtype>(optional[kBias]->dtype()) : cpu::Dtype::float32,
      .query = inputs.query.data<void>(),
      .key = inputs.key.data<void>(),
      .value = inputs.value.data<void>(),
      .out = const_cast<void*>(out.data<void>()),
      .lse = const_cast<float*>(lse.data<float>()),
      .visible = data_or_null<bool>(optional[kVisible]),
      .bias = data_or_null<void>(optional[kBias]),
      .key_start = data_or_null<int32_t>(optional[kKeyStart]),
      .key_stop = data_or_null<int32_t>(optional[kKeyStop]),
      .tree = data_or_null<uint32_t>(optional[kTree]),
      .sinks = data_or_null<float>(optional[kSinks]),
      .alibi_slopes = data_or_null<float>(optional[kAlibiSlopes]),
      .quant = make_quant_params(inputs, options),
      .group_dtype = options.bits == 0 ? cpu::Dtype::float32 : backend_dtype<cpu::Dtype>(optional[kKeyScales]->dtype()),
      .key_scales = data_or_null<void>(optional[kKeyScales]),
      .key_biases = data_or_null<void>(optional[kKeyBiases]),
      .value_scales = data_or_null<void>(optional[kValueScales]),
      .value_biases = data_or_null<void>(optional[kValueBiases]),
  };
}

metal::Work metal_forward(Kernel kernel, const Inputs& inputs, const Options& options, const mx::array& out,
                          const mx::array& lse) {
  auto [work, call] = metal_inputs(inputs, options, out, lse);
  work.arrays[metal::kOut] = out;
  work.arrays[metal::kLse] = lse;
  work.launches = metal::launches(kernel, call);
  return work;
}

cpu::BackwardArgs cpu_backward(const Inputs& inputs, const Options& options, const Saved& saved,
                               std::vector<mx::array>& gradients) {
  cpu::AttentionArgs forward = cpu_forward(inputs, options, saved.out, saved.lse);
  int batch_dims = forward.params.batch_dims;
  const mx::array* lse_gradient = saved.lse_gradient;
  return {
      .forward = forward,
      .out_gradient = saved.out_gradient.data<void>(),
      .lse_gradient = data_or_null<float>(lse_gradient),
      .out_gradient_strides = strides_of(saved.out_gradient, batch_dims, {head, row, column}),
      .lse_gradient_strides = lse_gradient ? strides_of(*lse_gradient, batch_dims, {head, row}) : Strides{},
      .query_gradient = gradients[0].data<void>(),
      .key_gradient = gradients[1].data<void>(),
      .value_gradient = gradients[2].data<void>(),
      .delta = gradients[3].data<float>(),
  };
}

metal::Work metal_backward(const Inputs& inputs, const Options& options, const Saved& saved,
                           const std::vector<mx::array>& gradients) {
  auto [work, call] = metal_inputs(inputs, options, saved.out, saved.lse);
  int batch_dims = call.params.batch_dims;
  BackwardParams& strides = work.backward;
  work.arrays[metal::kSavedOut] = saved.out;
  work.arrays[metal::kSavedLse] = saved.lse;
  work.arrays[metal::kDout] = saved.out_gradient;
  strides.dout = strides_of(saved.out_gradient, batch_dims, {head, row, column});
  if (saved.lse_gradient) {
    call.present[metal::kDlse] = true;
    work.arrays[metal::kDlse] = *saved.lse_gradient;
    strides.dlse = strides_of(*saved.lse_gradient, batch_dims, {head, row});
  }
  const std::pair<metal::Binding, Strides*> outputs[] = {
      {metal::kDq, &strides.dq}, {metal::kDk, &strides.dk}, {metal::kDv, &strides.dv}};
  for (size_t i = 0; i < std::size(outputs); ++i) {
    work.arrays[outputs[i].first] = gradients[i];
    *outputs[i].second = strides_of(gradients[i], batch_dims, {head, row, column});
  }
  work.arrays[metal::kDelta] = gradients[3];
  work.launches = metal::backward_launches(call, strides);
  return work;
}

}  // namespace flashattn
