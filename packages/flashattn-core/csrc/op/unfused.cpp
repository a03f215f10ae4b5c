// Attention as a graph of MLX's operations. Scores have shape (*B, H_kv, G, L, S), with G query heads per key/value
// head.
#include "unfused.h"

#include <cmath>
#include <limits>
#include <optional>

#include "forward.h"
#include "mlx/ops.h"

namespace flashattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Above this number, tanh() is 1 in float32. Larger arguments of tanh() are clipped to this number, because MLX's
// derivatives of tanh() would overflow and become NaN.
constexpr float kTanhIsOne = 10;
constexpr int kScoreDims = 4;  // besides the batch dimensions

mx::array as_float32(const mx::array& array, const mx::Stream& s) {
  return mx::astype(array, mx::float32, s);
}

// Splits the axis of query heads into the axes H_kv and G. If the axis has size 1, both new axes have size 1.
mx::array grouped(const mx::array& array, const Inputs& inputs, const mx::Stream& s) {
  if (static_cast<int>(array.ndim()) < -kHead) {
    return array;
  }
  int heads = inputs.query().shape(kHead), kv_heads = inputs.key().shape(kHead);
  return array.shape(kHead) == heads ? mx::unflatten(array, kHead, {kv_heads, heads / kv_heads}, s)
                                     : mx::expand_dims(array, kHead, s);
}

// Reshapes an array with one number per query head, so that it broadcasts to the scores.
mx::array of_each_head(const mx::array& numbers, const Inputs& inputs, const mx::Stream& s) {
  return grouped(mx::expand_dims(as_float32(numbers, s), {-2, -1}, s), inputs, s);
}

// Keys or values in float32, reshaped to (*B, H_kv, 1, S, D), so that they broadcast to the grouped queries.
mx::array of_each_group(const Inputs& inputs, Input tensor, Input scales, Input biases, const Options& options,
                        const mx::Stream& s) {
  mx::array elements = *inputs[tensor];
  if (options.bits != 0) {
    elements = mx::dequantize(elements, as_float32(*inputs[scales], s), as_float32(*inputs[biases], s),
                              options.group_size, options.bits, "affine", std::nullopt, std::nullopt, s);
  }
  return mx::expand_dims(as_float32(elements, s), -3, s);
}

// Returns mx::any() of two concatenated copies of the array, because MLX 0.32.4 crashes if a function that was exported
// without shapes reduces only axes of one element.
mx::array any_of(const mx::array& array, const std::vector<int>& axes, bool keep, const mx::Stream& s) {
  return mx::any(mx::concatenate({array, array}, axes.back(), s), axes, keep, s);
}

// Numbers the rows of a tensor from 0: forwards, or backwards if `after` is true. Uses a cumulative sum, because
// mx::arange() would fix the number of rows in a function that is exported without shapes.
mx::array count_rows(const mx::array& tensor, bool after, const mx::Stream& s) {
  std::vector<int> others;
  for (int axis = 0; axis < static_cast<int>(tensor.ndim()); ++axis) {
    if (axis != static_cast<int>(tensor.ndim()) + kRow) {
      others.push_back(axis);
    }
  }
  mx::array any = any_of(mx::stop_gradient(tensor, s), others, false, s);
  mx::array ones = mx::astype(mx::logical_or(any, mx::logical_not(any, s), s), mx::int32, s);
  return mx::cumsum(ones, 0, after, /*inclusive=*/false, s);
}

// Returns a bool array (*B, L, S) that says which keys each query sees. The last keys are the nodes of a tree. One
// matrix product picks each query's row of `tree`, and another picks each key's column. A gather would fix L and S in a
// function that is exported without shapes.
mx::array seen_of_tree(const mx::array& tree, const mx::array& keys_after, const mx::array& queries_after,
                       const mx::Stream& s) {
  int size = tree.shape(kRow);
  std::vector<uint32_t> powers;
  for (int bit = 0; bit < 32; ++bit) {
    powers.push_back(uint32_t{1} << bit);
  }
  // Divides instead of shifting, because MLX 0.32.4 reads out of bounds if mx.vmap maps only one operand of a shift.
  mx::array bits = mx::floor_divide(mx::expand_dims(tree, -1, s), mx::array(powers.begin(), {32}), s);
  bits = as_float32(mx::flatten(mx::remainder(bits, mx::array(2, mx::uint32), s), -2, -1, s), s);

  const auto node_of = [&](const mx::array& after) {  // negative for rows before the tree
    return mx::expand_dims(mx::subtract(mx::array(size - 1, mx::int32), after, s), -1, s);
  };
  mx::array query_node = node_of(queries_after), key_node = node_of(keys_after);
  mx::array is_query = as_float32(mx::equal(query_node, mx::arange(size, mx::int32, s), s), s);
  mx::array is_key = as_float32(mx::equal(key_node, mx::arange(bits.shape(kColumn), mx::int32, s), s), s);
  mx::array seen = mx::matmul(mx::matmul(is_query, bits, s), mx::swapaxes(is_key, -2, -1, s), s);
  mx::array before_tree = mx::squeeze(mx::less(key_node, mx::array(0, mx::int32), s), -1, s);
  return mx::logical_or(mx::not_equal(seen, mx::array(0.0f), s), before_tree, s);
}

struct Positions {
  mx::array keys_before, keys_after, queries_after;
  mx::array distance;  // i + S - L - j for query i and key j, as (L, S)
};

Positions positions_of(const Inputs& inputs, const mx::Stream& s) {
  mx::array keys_after = count_rows(inputs.key(), true, s), queries_after = count_rows(inputs.query(), true, s);
  return {count_rows(inputs.key(), false, s), keys_after, queries_after,
          mx::subtract(keys_after, mx::expand_dims(queries_after, -1, s), s)};
}

// Returns which keys each query sees under all masks. The result broadcasts to the scores. It is empty if there is no
// mask.
std::optional<mx::array> visible_of(const Inputs& inputs, const Options& options, const Positions& positions,
                                    const mx::Stream& s) {
  std::optional<mx::array> visible;
  const auto show = [&](const mx::array& more) { visible = visible ? mx::logical_and(*visible, more, s) : more; };
  const auto bound = [&](const mx::array& of_batch) { return mx::expand_dims(of_batch, {-4, -3, -2, -1}, s); };
  if (options.causal) {
    show(mx::greater_equal(positions.distance, mx::array(0, mx::int32), s));
  }
  if (options.window > 0) {
    show(mx::less(positions.distance, mx::array(options.window, mx::int32), s));
  }
  if (const mx::array* start = inputs[Input::key_start]) {
    show(mx::greater_equal(positions.keys_before, bound(*start), s));
  }
  if (const mx::array* stop = inputs[Input::key_stop]) {
    show(mx::less(positions.keys_before, bound(*stop), s));
  }
  if (const mx::array* tree = inputs[Input::tree]) {
    mx::array seen = seen_of_tree(*tree, positions.keys_after, positions.queries_after, s);
    show(mx::expand_dims(seen, {-4, -3}, s));
  }
  if (const mx::array* array = inputs[Input::visible]) {
    show(grouped(*array, inputs, s));
  }
  if (const mx::array* bias = inputs[Input::bias]) {
    show(mx::logical_not(mx::isneginf(grouped(*bias, inputs, s), s), s));
  }
  while (visible && visible->ndim() < kScoreDims) {
    visible = mx::expand_dims(*visible, 0, s);
  }
  return visible;
}

std::vector<mx::array> attend(const Inputs& inputs, const Options& options, const mx::Stream& s) {
  mx::array zero(0.0f), minus_infinity(-kInfinity);
  if (inputs.query().size() == 0 || inputs.key().size() == 0) {  // MLX takes no maximum over an empty axis
    std::vector<mx::Shape> shapes = shapes_of_outputs(inputs, options);
    return {mx::zeros(shapes[0], inputs.query().dtype(), s), mx::full(shapes[1], minus_infinity, s)};
  }
  mx::array query = grouped(as_float32(inputs.query(), s), inputs, s);
  mx::array key = of_each_group(inputs, Input::key, Input::key_scales, Input::key_biases, options, s);
  mx::array value = of_each_group(inputs, Input::value, Input::value_scales, Input::value_biases, options, s);
  Positions positions = positions_of(inputs, s);
  std::optional<mx::array> visible = visible_of(inputs, options, positions, s);
  if (visible) {
    // Queries that see no key, and keys and values that no query sees, may hold NaN. They become 0 here, because 0 *
    // NaN is NaN.
    mx::array seen = mx::swapaxes(any_of(*visible, {-3, -2}, true, s), -2, -1, s);
    query = mx::where(any_of(*visible, {-1}, true, s), query, zero, s);
    key = mx::where(seen, key, zero, s);
    value = mx::where(seen, value, zero, s);
  }

  float scale = options.scale.value_or(1 / std::sqrt(static_cast<float>(inputs.query().shape(kColumn))));
  mx::array scores = mx::matmul(mx::multiply(query, mx::array(scale), s), mx::swapaxes(key, -2, -1, s), s);
  if (options.softcap != 0) {
    mx::array cap(options.softcap), most(kTanhIsOne);
    mx::array bounded = mx::clip(mx::divide(scores, cap, s), mx::negative(most, s), most, s);
    scores = mx::multiply(cap, mx::tanh(bounded, s), s);
  }
  // Slopes and bias are multiplied by `rows`, a column of ones. So their gradients are summed over keys first, and over
  // queries afterwards. A single float32 sum would be less precise, because on the CPU MLX adds term after term.
  mx::array rows = mx::expand_dims(mx::equal(positions.queries_after, positions.queries_after, s), -1, s);
  if (const mx::array* slopes = inputs[Input::alibi_slopes]) {
    mx::array slope = mx::multiply(of_each_head(*slopes, inputs, s), rows, s);
    scores = mx::subtract(scores, mx::multiply(slope, as_float32(mx::abs(positions.distance, s), s), s), s);
  }
  if (const mx::array* bias = inputs[Input::bias]) {
    mx::array added = grouped(as_float32(*bias, s), inputs, s);
    added = mx::where(mx::isneginf(added, s), zero, added, s);
    scores = mx::add(scores, mx::multiply(added, rows, s), s);
  }
  if (visible) {
    scores = mx::where(*visible, scores, minus_infinity, s);
  }

  // The logarithm of the softmax's denominator is kept as two numbers, top + rest. In one float32 number a large top
  // would round a small rest away.
  mx::array top = mx::stop_gradient(mx::logsumexp(scores, -1, true, s), s);
  mx::array sees_nothing = mx::isneginf(top, s);
  scores = mx::where(sees_nothing, zero, scores, s);
  std::optional<mx::array> sinks;
  if (inputs[Input::sinks]) {
    sinks = of_each_head(*inputs[Input::sinks], inputs, s);
    top = mx::maximum(top, mx::stop_gradient(*sinks, s), s);
  }
  top = mx::where(sees_nothing, zero, top, s);
  scores = mx::subtract(scores, top, s);
  mx::array rest = mx::logsumexp(scores, -1, true, s);
  if (sinks) {
    rest = mx::logaddexp(rest, mx::where(sees_nothing, zero, mx::subtract(*sinks, top, s), s), s);
  }
  mx::array out = mx::matmul(mx::exp(mx::subtract(scores, rest, s), s), value, s);
  out = mx::where(sees_nothing, zero, out, s);
  mx::array lse = mx::where(sees_nothing, minus_infinity, mx::add(top, rest, s), s);
  return {mx::flatten(mx::astype(out, inputs.query().dtype(), s), -4, -3, s),
          mx::flatten(mx::squeeze(lse, -1, s), -3, -2, s)};
}

}  // namespace

Function unfused_attention(const Options& options, const Present& present, const mx::Stream& stream) {
  return [=](const std::vector<mx::array>& inputs) { return attend(Inputs(inputs, present), options, stream); };
}

}  // namespace flashattn
