// The checks of shapes, dtypes and options, with their messages.
#include "checks.h"

#include <cmath>

#include "../call/fail.h"
#include "../call/params.h"
#include "mlx/utils.h"

namespace flashattn {
namespace {

bool is_attention_dtype(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

// Checks that quantised keys or values are uint32 words, with one scale and one bias per group.
void check_quantised(const char* name, const mx::array& words, const mx::array* scales, const mx::array* biases,
                     const Options& options, mx::Dtype group_dtype) {
  if (words.dtype() != mx::uint32) {
    fail(name, " is ", words.dtype(), ", expected uint32, as mx.quantize() makes it");
  }
  if (int64_t{words.shape(kColumn)} * 32 % (int64_t{options.bits} * options.group_size) != 0) {
    fail(name, " has ", words.shape(kColumn), " words in a row, expected whole groups of ", options.group_size,
         " elements of ", options.bits, " bits");
  }
  mx::Shape expected = words.shape();
  expected.back() = columns_of(words, options) / options.group_size;
  for (auto [part, array] : {std::pair("scales", scales), std::pair("biases", biases)}) {
    if (!array) {
      fail(name, " has no ", part, ", expected (weights, scales, biases)");
    }
    if (array->shape() != expected) {
      fail(name, " has ", part, " of shape ", array->shape(), ", expected ", expected, " beside weights of shape ",
           words.shape());
    }
    if (array->dtype() != group_dtype || !is_attention_dtype(group_dtype)) {
      fail(name, " has ", part, " of ", array->dtype(),
           ", expected float32, float16 or bfloat16, the same for all scales and biases");
    }
  }
}

void check_storage(const Inputs& inputs, const Options& options) {
  if (options.bits == 0) {
    for (auto [name, tensor] : {std::pair("key", &inputs.key()), std::pair("value", &inputs.value())}) {
      if (!is_attention_dtype(tensor->dtype())) {
        fail(name, " is ", tensor->dtype(), ", expected float32, float16 or bfloat16");
      }
      if (tensor->dtype() != inputs.query().dtype()) {
        fail(name, " is ", tensor->dtype(), ", expected query's ", inputs.query().dtype());
      }
    }
    return;
  }
  if (options.bits < 1 || options.bits == 7 || options.bits > 8) {
    fail("bits is ", options.bits, ", expected 1, 2, 3, 4, 5, 6 or 8");
  }
  if (options.group_size != 32 && options.group_size != 64 && options.group_size != 128) {
    fail("group_size is ", options.group_size, ", expected 32, 64 or 128");
  }
  const mx::array *key_scales = inputs[Input::key_scales], *value_scales = inputs[Input::value_scales];
  mx::Dtype dtype = key_scales ? key_scales->dtype() : mx::float32;
  check_quantised("key", inputs.key(), key_scales, inputs[Input::key_biases], options, dtype);
  check_quantised("value", inputs.value(), value_scales, inputs[Input::value_biases], options, dtype);
}

void check_tensors(const Inputs& inputs, const Options& options) {
  const mx::array &query = inputs.query(), &key = inputs.key(), &value = inputs.value();
  const std::pair<const char*, const mx::array*> tensors[] = {{"query", &query}, {"key", &key}, {"value", &value}};
  for (auto [name, tensor] : tensors) {
    if (tensor->ndim() < 3 || tensor->ndim() > 3 + kMaxBatchDims) {
      fail(name, " has shape ", tensor->shape(), ", expected (*B, heads, length, dim): 3 to ", 3 + kMaxBatchDims,
           " dimensions");
    }
    if (tensor->ndim() != query.ndim() || batch_shape(*tensor) != batch_shape(query)) {
      fail(name, " has shape ", tensor->shape(), ", expected the leading dimensions of query, ", query.shape());
    }
  }
  if (!is_attention_dtype(query.dtype())) {
    fail("query is ", query.dtype(), ", expected float32, float16 or bfloat16");
  }
  check_storage(inputs, options);
  int key_dim = columns_of(key, options), value_dim = columns_of(value, options);
  if (query.shape(kColumn) < 1 || query.shape(kColumn) > kMaxHeadDim) {
    fail("query has head_dim ", query.shape(kColumn), ", expected 1 to ", kMaxHeadDim);
  }
  if (key_dim != query.shape(kColumn)) {
    fail("key has head_dim ", key_dim, ", expected query's ", query.shape(kColumn));
  }
  if (value_dim < 1 || value_dim > kMaxHeadDim) {
    fail("value has head_dim ", value_dim, ", expected 1 to ", kMaxHeadDim);
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

// The shape that an input broadcasts to.
mx::Shape target_of(const InputRule& rule, const Inputs& inputs) {
  const mx::array &query = inputs.query(), &key = inputs.key(), &given = *inputs[rule.input];
  mx::Shape target = batch_shape(query);
  switch (rule.axes) {
    case Axes::batch: break;
    case Axes::tree: target.insert(target.end(), {given.shape(-2), given.shape(-1)}); break;
    case Axes::scores: target.insert(target.end(), {query.shape(kHead), query.shape(kRow), key.shape(kRow)}); break;
    case Axes::blocks:
      target.insert(target.end(), {query.shape(kHead), blocks_of(query.shape(kRow)), blocks_of(key.shape(kRow))});
      break;
    case Axes::heads: target.push_back(query.shape(kHead)); break;
    case Axes::tensor: break;  // check_tensors() and check_quantised() check these
  }
  return target;
}

void check_broadcast_shapes(const Inputs& inputs) {
  for (const InputRule& rule : kInputRules) {
    const mx::array* given = inputs[rule.input];
    if (!given || rule.axes == Axes::tensor) {
      continue;
    }
    if (rule.axes == Axes::tree) {
      int size = given->ndim() < 2 ? 0 : given->shape(-2), key_len = inputs.key().shape(kRow);
      if (size < 1 || size > key_len || int64_t{given->shape(-1)} * 32 < size) {
        fail(rule.called, " has shape ", given->shape(),
             ", expected (*B, T, T), or packed (*B, T, ceil(T / 32)), with T at least 1 and T at most key's length, ",
             key_len);
      }
    }
    mx::Shape target = target_of(rule, inputs);
    if (!broadcasts(given->shape(), target)) {
      fail(rule.called, " has shape ", given->shape(), ", expected one that broadcasts to ", target);
    }
  }
}

void check_dtype(const InputRule& rule, const mx::array& given, mx::Dtype query_dtype) {
  const auto expect = [&](mx::Dtype dtype) {
    if (given.dtype() != dtype) {
      fail(rule.called, " is ", given.dtype(), ", expected ", dtype);
    }
  };
  switch (rule.dtype) {
    case InputDtype::int32: return expect(mx::int32);
    case InputDtype::uint32: return expect(mx::uint32);
    case InputDtype::boolean: return expect(mx::bool_);
    case InputDtype::bytes: return expect(mx::uint8);
    case InputDtype::additive:
    case InputDtype::logits:  // the same rule as in mx.fast.scaled_dot_product_attention
      if (mx::promote_types(given.dtype(), query_dtype) != query_dtype) {
        fail(rule.called, " is ", given.dtype(), ", expected a dtype that promotes to query's ", query_dtype);
      }
      return;
    case InputDtype::slopes:
      if (!mx::issubdtype(given.dtype(), mx::floating)) {
        fail(rule.called, " is ", given.dtype(), ", expected a floating dtype");
      }
      return;
    case InputDtype::tensor:
    case InputDtype::groups: return;  // check_storage() checks these
  }
}

void check_given(const Inputs& inputs) {
  const mx::array& query = inputs.query();
  for (const InputRule& rule : kInputRules) {
    const mx::array* given = inputs[rule.input];
    if (!given) {
      continue;
    }
    check_dtype(rule, *given, query.dtype());
    // Callers must pass sinks and slopes with one dimension. After this check, mx.vmap may add batch dimensions.
    if (rule.axes == Axes::heads && given->shape() != mx::Shape{query.shape(kHead)}) {
      fail(rule.called, " has shape ", given->shape(), ", expected (", query.shape(kHead),
           "): one number per query head");
    }
  }
}

void check_score_options(const Options& options) {
  float scale = options.scale.value_or(1);
  if (!std::isfinite(scale)) {
    fail("scale is ", scale, ", expected a finite number");
  }
  if (!std::isfinite(options.softcap) || options.softcap < 0) {
    fail("softcap is ", options.softcap, ", expected a finite number, or 0 for none");
  }
  // With soft-cap, GPU kernels multiply by scale / softcap. So this quotient must be finite, too.
  if (options.softcap > 0 && !std::isfinite(scale / options.softcap)) {
    fail("softcap is ", options.softcap, ", expected a number by which scale, ", scale, ", can be divided");
  }
  if (options.window < 0) {
    fail("window is ", options.window, ", expected at least 1");
  }
}

}  // namespace

void check_arguments(const Arguments& arguments) {
  Inputs inputs(arguments);
  check_tensors(inputs, arguments.options);
  check_score_options(arguments.options);
  check_given(inputs);
  check_broadcast_shapes(inputs);
}

void check_shapes(const Inputs& inputs, const Options& options) {
  check_tensors(inputs, options);
  check_broadcast_shapes(inputs);
}

}  // namespace flashattn
