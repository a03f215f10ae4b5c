// A call's arguments as a primitive's inputs, and back to names.
#include "arguments.h"

#include <algorithm>
#include <limits>

#include "mlx/ops.h"

namespace flashattn {

Present present_in(const Arguments& arguments) {
  Present present;
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    present[i] = arguments.optional[i].has_value();
  }
  return present;
}

std::vector<mx::array> primitive_inputs(const Arguments& arguments, const mx::Stream& stream) {
  std::vector<mx::array> inputs = {arguments.query, arguments.key, arguments.value};
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    if (!arguments.optional[i]) {
      continue;
    }
    mx::array input = *arguments.optional[i];
    if (i == kSinks || i == kAlibiSlopes) {
      input = mx::astype(input, mx::float32, stream);
    } else if (i == kBias && !mx::issubdtype(input.dtype(), mx::floating)) {
      input = mx::astype(input, arguments.query.dtype(), stream);
    }
    inputs.push_back(std::move(input));
  }
  return inputs;
}

Inputs::Inputs(const std::vector<mx::array>& primitive_inputs, const Present& present)
    : query(primitive_inputs[0]), key(primitive_inputs[1]), value(primitive_inputs[2]), optional{} {
  size_t next = 3;
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    optional[i] = present[i] ? &primitive_inputs[next++] : nullptr;
  }
}

Inputs::Inputs(const Arguments& arguments)
    : query(arguments.query), key(arguments.key), value(arguments.value), optional{} {
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    optional[i] = arguments.optional[i] ? &*arguments.optional[i] : nullptr;
  }
}

int columns_of(const mx::array& tensor, const Options& options) {
  if (options.bits == 0) {
    return tensor.shape(kColumn);
  }
  int64_t columns = int64_t{tensor.shape(kColumn)} * 32 / options.bits;
  return static_cast<int>(std::min<int64_t>(columns, std::numeric_limits<int>::max()));  // the checks refuse that
}

CallShape call_shape(const Inputs& inputs, const Options& options) {
  return {.query_len = inputs.query.shape(kRow),
          .key_len = inputs.key.shape(kRow),
          .head_dim = inputs.query.shape(kColumn),
          .value_dim = columns_of(inputs.value, options),
          .quantised = options.bits != 0};
}

mx::Shape batch_shape(const mx::array& query) {
  return mx::Shape(query.shape().begin(), query.shape().end() - 3);
}

std::vector<mx::Shape> shapes_of_outputs(const Inputs& inputs, const Options& options) {
  const mx::array& query = inputs.query;
  mx::Shape lse(query.shape().begin(), query.shape().end() - 1);
  mx::Shape out = lse;
  out.push_back(columns_of(inputs.value, options));
  return {out, lse};
}

}  // namespace flashattn
