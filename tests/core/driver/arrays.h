// The arrays of a call: their addresses, dtypes, strides and shapes.
#pragma once

#include "backward.h"
#include "call/inputs.h"

namespace flashattn::cpu {

inline Dtype float_dtype(const AttentionArgs& args, InputDtype dtype) {
  switch (dtype) {
    case InputDtype::tensor: return args.dtype;
    case InputDtype::groups: return args.group_dtype;
    case InputDtype::additive: return args.bias_dtype;
    default: return Dtype::float32;
  }
}
constexpr InputDtype kFloat32 = InputDtype::slopes;  // float_dtype() of slopes is float32

// An array of shape (*B, heads, rows, columns). Dimensions that the array lacks have size 1.
struct Array {
  const char* name;
  const void* data;
  InputDtype dtype;
  Strides strides;
  int64_t heads, rows, columns;

  int64_t element_size(const AttentionArgs& args) const {
    bool is_byte = dtype == InputDtype::boolean || dtype == InputDtype::bytes;
    return is_byte ? 1 : size_of(float_dtype(args, dtype));  // int32 and uint32 have the size of float32
  }
};

inline Array input_array(const AttentionArgs& args, const InputRule& rule, const char* name, const void* data,
                         const Strides& strides) {
  const AttentionParams& p = args.params;
  Array array = {name, data, rule.dtype, strides, 1, 1, 1};
  const auto with = [&](int64_t heads, int64_t rows, int64_t columns) {
    array.heads = heads, array.rows = rows, array.columns = columns;
    return array;
  };
  switch (rule.axes) {
    case Axes::scores: return with(p.num_heads, p.query_len, p.key_len);
    case Axes::blocks: return with(p.num_heads, blocks_of(p.query_len), blocks_of(p.key_len));
    case Axes::tree: return with(1, p.tree_size, (p.tree_size + 31) / 32);
    case Axes::heads: return with(p.num_heads, 1, 1);
    case Axes::batch: return array;
    case Axes::tensor: break;
  }
  if (rule.input == Input::query) return with(p.num_heads, p.query_len, p.head_dim);
  bool of_value = rule.input == Input::value || rule.input == Input::value_scales || rule.input == Input::value_biases;
  int64_t columns = of_value ? p.value_dim : p.head_dim;
  if (rule.dtype == InputDtype::groups) {
    columns /= p.group_size;
  } else if (p.bits != 0) {
    array.dtype = InputDtype::uint32;
    columns = columns * p.bits / 32;
  }
  return with(p.num_kv_heads, p.key_len, columns);
}

// Calls visit(array, pointer, strides) for each input that is required or not null. `pointer` and `strides` refer to
// the fields of `args`.
template <typename Args, typename Visit>
void for_each_input(Args& args, Visit visit) {
  const auto visit_input = [&](const InputRule& rule, const char* name, auto& pointer, auto& strides) {
    bool needed = index(rule.input) < kNumTensors || (rule.dtype == InputDtype::groups && args.params.bits != 0);
    if (needed || pointer) visit(input_array(args, rule, name, pointer, strides), pointer, strides);
  };
#define FLASHATTN_VISIT(name, ...) visit_input(kInputRules[index(Input::name)], #name, args.name, args.params.name);
  FLASHATTN_INPUTS(FLASHATTN_VISIT)
#undef FLASHATTN_VISIT
}

// Calls visit(array, pointer, strides) for each output of the forward pass.
template <typename Args, typename Visit>
void for_each_output(Args& args, Visit visit) {
  auto& p = args.params;
  Array out = {"out", args.out, InputDtype::tensor, p.out, p.num_heads, p.query_len, p.value_dim};
  Array exact_out = {"exact_out", args.exact_out, kFloat32, p.out, p.num_heads, p.query_len, p.value_dim};
  visit(out, args.out, p.out);
  if (args.exact_out) visit(exact_out, args.exact_out, p.out);  // has the strides of out
  visit(Array{"lse", args.lse, kFloat32, p.lse, p.num_heads, p.query_len, 1}, args.lse, p.lse);
  visit(Array{"row_stats", args.row_stats, kFloat32, p.row_stats, p.num_heads, p.query_len, 2}, args.row_stats,
        p.row_stats);
}

// Calls visit(array, pointer, strides) for the gradient of out and, unless it is null, for that of lse.
template <typename Args, typename Visit>
void for_each_cotangent(Args& args, Visit visit) {
  const AttentionParams& p = args.forward.params;
  auto &of_out = args.out_gradient_strides, &of_lse = args.lse_gradient_strides;
  visit(Array{"out_gradient", args.out_gradient, InputDtype::tensor, of_out, p.num_heads, p.query_len, p.value_dim},
        args.out_gradient, of_out);
  if (!args.lse_gradient) return;
  visit(Array{"lse_gradient", args.lse_gradient, kFloat32, of_lse, p.num_heads, p.query_len, 1}, args.lse_gradient,
        of_lse);
}

}  // namespace flashattn::cpu
