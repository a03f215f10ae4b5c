// Defines what mx.vmap makes of a primitive's inputs.
#include "primitive.h"

#include <numeric>

#include "../call/fail.h"
#include "../call/params.h"
#include "deferred.h"
#include "mlx/ops.h"

namespace flashattn {
namespace {

struct InputDims {
  int own;     // the number of dimensions after the batch dimensions
  bool whole;  // whether the input must have all batch dimensions in full size; other inputs are broadcast
};

// One entry for each input that the call has.
std::vector<InputDims> input_dims(const Present& present) {
  std::vector<InputDims> dims;
  for (const InputRule& rule : kInputRules) {
    if (present[index(rule.input)]) {
      dims.push_back({used(rule.axes).count(), rule.axes == Axes::tensor});
    }
  }
  return dims;
}

}  // namespace

// An input without a mapped axis stays unchanged, but a `whole` input is repeated along a new first dimension.
Arrays mapped_inputs(const Arrays& inputs, const std::vector<int>& axes, const Present& present,
                     const mx::Stream& stream) {
  std::vector<InputDims> dims = input_dims(present);
  // The gradient's further inputs have all batch dimensions, so their `own` is not needed.
  dims.resize(inputs.size(), {.own = 0, .whole = true});
  size_t mapped_input = 0;
  while (axes[mapped_input] < 0) ++mapped_input;
  int batch_dims = static_cast<int>(inputs[0].ndim()) - (axes[0] >= 0 ? 1 : 0) - dims[0].own;
  if (batch_dims + 1 > kMaxBatchDims) {
    fail("vmap makes ", batch_dims + 1, " batch dimensions, expected at most ", kMaxBatchDims);
  }
  Arrays mapped;
  for (size_t i = 0; i < inputs.size(); ++i) {
    mx::array input = inputs[i];
    if (axes[i] >= 0) {
      input = mx::moveaxis(input, axes[i], 0, stream);
      // Inserts the batch dimensions that the input lacks, between the mapped axis and the input's last dimensions.
      std::vector<int> missing(std::max(0, 1 + batch_dims + dims[i].own - static_cast<int>(input.ndim())));
      std::iota(missing.begin(), missing.end(), 1);
      if (!missing.empty()) input = mx::expand_dims(input, missing, stream);
    } else if (dims[i].whole) {
      const auto repeated = [axis = axes[mapped_input], stream](const Arrays& given) {
        mx::Shape shape = given[0].shape();
        shape.insert(shape.begin(), given[1].shape(axis));
        return std::vector{mx::broadcast_to(given[0], shape, stream)};
      };
      input = deferred(repeated, {input, inputs[mapped_input]}, stream)[0];
    }
    mapped.push_back(std::move(input));
  }
  return mapped;
}

}  // namespace flashattn
