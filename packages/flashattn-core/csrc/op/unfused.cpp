// Attention as a graph of MLX's operations. Scores have shape (*B, H_kv, G, L, S), with G query heads per key/value
// head.
#include "unfused.h"

#include <limits>
#include <optional>

#include "../request/checks.h"
#include "forward.h"
#include "mlx/ops.h"
#include "shapeless.h"
#include "tree.h"

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
  return array.shape(kHead) == 1 || heads == kv_heads ? mx::expand_dims(array, kHead, s)
                                                      : mx::unflatten(array, kHead, {kv_heads, heads / kv_heads}, s);
}

// Undoes grouped() for an output, in which the axis of size G is `group`.
mx::array ungrouped(const mx::array& array, int group, const Inputs& inputs, const mx::Stream& s) {
  return inputs.query().shape(kHead) == inputs.key().shape(kHead) ? mx::squeeze(array, group, s)
                                                                  : mx::flatten(array, group - 1, group, s);
}

// Reshapes an array with one number per query head, so that it broadcasts to the scores.
mx::array of_each_head(const mx::array& numbers, const Inputs& inputs, const mx::Stream& s) {
  return grouped(mx::expand_dims(as_float32(numbers, s), {-2, -1}, s), inputs, s);
}

// Repeats an array along the axes of the scores, from `last` on forwards. In a shapeless function, MLX's own
// broadcasts sum a gradient over the axes that they repeated in the first call.
mx::array repeated(mx::array array, int last, const Inputs& inputs, const mx::Stream& s) {
  const mx::array &query = inputs.query(), &key = inputs.key();
  int dims = static_cast<int>(query.ndim()) + 1;
  while (static_cast<int>(array.ndim()) < dims) {
    array = mx::expand_dims(array, 0, s);
  }
  for (int axis = last; axis >= -dims; --axis) {
    // The axis G keeps its size, and so does H_kv unless G is 1.
    if (axis == -3 || (axis == -4 && query.shape(kHead) != key.shape(kHead))) continue;
    mx::array numbers = axis == -1   ? numbered(key, kRow, false, s)
                        : axis == -2 ? numbered(query, kRow, false, s)
                                     : numbered(query, axis + 1, false, s);
    for (int after = axis; after < -1; ++after) {
      numbers = mx::expand_dims(numbers, -1, s);
    }
    array = taken(array, numbers, axis, s);
  }
  return array;
}

// Keys or values in float32, reshaped to (*B, H_kv, 1, S, D), so that they broadcast to the grouped queries.
mx::array of_each_group(const Inputs& inputs, Input tensor, Input scales, Input biases, const Options& options,
                        const mx::Stream& s) {
  mx::array elements = *inputs[tensor];
  if (options.bits != 0) {
    elements = mx::dequantize(elements, as_float32(*inputs[scales], s), as_float32(*inputs[biases], s),
                              options.group_size, options.bits, "affine", std::nullopt, std::nullopt, s);
  }
  elements = as_float32(elements, s);
  if (is_shapeless() && inputs.query().shape(kHead) == inputs.key().shape(kHead)) {
    // The function may be called with other numbers of heads, so each query head gets its own keys.
    const auto divided = [&](const mx::array& a, const mx::array& b) {
      return mx::floor_divide(a, mx::maximum(b, mx::array(1), s), s);
    };
    mx::array group = divided(size_of(inputs.query(), kHead, mx::int32, s), size_of(inputs.key(), kHead, mx::int32, s));
    mx::array of_head = divided(numbered(inputs.query(), kHead, false, s), group);
    elements = taken(elements, mx::expand_dims(of_head, {-2, -1}, s), kHead, s);
  }
  return mx::expand_dims(elements, -3, s);
}

// The size of D in a shapeless function is known only when the function runs.
mx::array scale_of(const Inputs& inputs, const Options& options, const mx::Stream& s) {
  if (options.scale) return mx::array(*options.scale);
  return mx::divide(mx::array(1.0f), mx::sqrt(size_of(inputs.query(), kColumn, mx::float32, s), s), s);
}

// Returns `query` unchanged. In an exported function grouped() keeps the numbers of heads, and MLX's dequantize() the
// shape of the keys. If they change when the function runs, MLX refuses to reshape an axis' numbers.
mx::array with_shapes_checked(mx::array query, const Inputs& inputs, const Options& options, const mx::Stream& s) {
  const auto check = [&](const mx::array& tensor, int axis) {
    mx::array numbers = mx::reshape(numbered(tensor, axis, false, s), {1, tensor.shape(axis)}, s);
    mx::array same = any_of(mx::greater_equal(numbers, mx::array(0), s), {0, 1}, false, s);
    query = mx::where(same, query, mx::array(0.0f), s);
  };
  if (inputs.query().shape(kHead) != inputs.key().shape(kHead)) {  // else of_each_group() follows
    check(inputs.query(), kHead);
    check(inputs.key(), kHead);
  }
  for (int axis = kRow; options.bits != 0 && axis >= -static_cast<int>(query.ndim()) + 1; --axis) {
    check(inputs.key(), axis);
  }
  return query;
}

// Appends two hidden keys. MLX 0.32.4 crashes if a shapeless function takes logsumexp() of no scores, or its
// derivative of one score. `keys` numbers the keys, and has as many dimensions as `scores`.
mx::array with_hidden_keys(const mx::array& scores, const mx::array& keys, const mx::Stream& s) {
  mx::array shape = mx::isnan(mx::stop_gradient(scores, s), s), column = any_of(shape, {-1}, true, s);
  mx::array hidden =
      mx::full_like(mx::concatenate({shape, column, column}, -1, s), mx::array(-kInfinity), mx::float32, s);
  return mx::put_along_axis(hidden, keys, scores, -1, s);
}

struct Positions {
  mx::array keys_before, keys_after, queries_after;
  mx::array distance;  // i + S - L - j for query i and key j, as (L, S)
};

Positions positions_of(const Inputs& inputs, const mx::Stream& s) {
  mx::array keys_after = numbered(inputs.key(), kRow, true, s);
  mx::array queries_after = numbered(inputs.query(), kRow, true, s);
  return {numbered(inputs.key(), kRow, false, s), keys_after, queries_after,
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
    mx::array seen = seen_in_tree(*tree, positions.keys_after, positions.queries_after, s);
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

Arrays attend(const Inputs& inputs, const Options& options, const mx::Stream& s) {
  check_shapes(inputs, options);
  mx::array zero(0.0f), minus_infinity(-kInfinity);
  if (inputs.query().size() == 0 || inputs.key().size() == 0) {  // MLX takes no maximum over an empty axis
    std::vector<mx::Shape> shapes = shapes_of_outputs(inputs, options);
    return {mx::zeros(shapes[0], inputs.query().dtype(), s), mx::full(shapes[1], minus_infinity, s)};
  }
  mx::array query = grouped(as_float32(inputs.query(), s), inputs, s);
  mx::array key = of_each_group(inputs, Input::key, Input::key_scales, Input::key_biases, options, s);
  mx::array value = of_each_group(inputs, Input::value, Input::value_scales, Input::value_biases, options, s);
  if (is_shapeless()) query = with_shapes_checked(query, inputs, options, s);
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

  mx::array scores = mx::matmul(mx::multiply(query, scale_of(inputs, options, s), s), mx::swapaxes(key, -2, -1, s), s);
  if (options.softcap != 0) {
    mx::array cap(options.softcap), most(kTanhIsOne * options.softcap);
    mx::array bounded = mx::clip(scores, mx::negative(most, s), most, s);  // a quotient beyond float32 would become NaN
    scores = mx::multiply(cap, mx::tanh(mx::divide(bounded, cap, s), s), s);
  }
  // Slopes and bias are multiplied by `rows`, a column of ones. So their gradients are summed over keys first, and over
  // queries afterwards. A single float32 sum would be less precise, because on the CPU MLX adds term after term.
  bool shapeless = is_shapeless();
  mx::array rows = mx::expand_dims(mx::equal(positions.queries_after, positions.queries_after, s), -1, s);
  const auto over_rows = [&](const mx::array& array) {
    return shapeless ? repeated(array, -1, inputs, s) : mx::multiply(array, rows, s);
  };
  if (const mx::array* slopes = inputs[Input::alibi_slopes]) {
    mx::array slope = over_rows(of_each_head(*slopes, inputs, s));
    scores = mx::subtract(scores, mx::multiply(slope, as_float32(mx::abs(positions.distance, s), s), s), s);
  }
  if (const mx::array* bias = inputs[Input::bias]) {
    mx::array added = grouped(as_float32(*bias, s), inputs, s);
    added = mx::where(mx::isneginf(added, s), zero, added, s);
    scores = mx::add(scores, over_rows(added), s);
  }
  if (visible) {
    scores = mx::where(*visible, scores, minus_infinity, s);
  }

  mx::array keys = positions.keys_before;
  while (keys.ndim() < scores.ndim()) keys = mx::expand_dims(keys, 0, s);
  if (shapeless) scores = with_hidden_keys(scores, keys, s);

  // The logarithm of the softmax's denominator is kept as two numbers, top + rest. In one float32 number a large top
  // would round a small rest away.
  mx::array top = mx::stop_gradient(mx::logsumexp(scores, -1, true, s), s);
  mx::array sees_nothing = mx::isneginf(top, s);
  scores = mx::where(sees_nothing, zero, scores, s);
  std::optional<mx::array> sinks;
  if (inputs[Input::sinks]) {
    sinks = of_each_head(*inputs[Input::sinks], inputs, s);
    if (shapeless) sinks = repeated(*sinks, kRow, inputs, s);
    top = mx::maximum(top, mx::stop_gradient(*sinks, s), s);
  }
  top = mx::where(sees_nothing, zero, top, s);
  scores = mx::subtract(scores, top, s);
  mx::array rest = mx::logsumexp(scores, -1, true, s);
  if (sinks) {
    rest = mx::logaddexp(rest, mx::where(sees_nothing, zero, mx::subtract(*sinks, top, s), s), s);
  }
  mx::array weights = mx::exp(mx::subtract(scores, rest, s), s);
  if (shapeless) weights = mx::take_along_axis(weights, keys, -1, s);
  mx::array out = mx::matmul(weights, value, s);
  out = mx::where(sees_nothing, zero, out, s);
  mx::array lse = mx::where(sees_nothing, minus_infinity, mx::add(top, rest, s), s);
  return {ungrouped(mx::astype(out, inputs.query().dtype(), s), -3, inputs, s),
          ungrouped(mx::squeeze(lse, -1, s), -2, inputs, s)};
}

}  // namespace

Function unfused_attention(const Options& options, const Present& present, const mx::Stream& stream) {
  return [=](const Arrays& inputs) { return attend(Inputs(inputs, present), options, stream); };
}

}  // namespace flashattn
