// A sink adds to a row's sum but has no value. So its gradient is the sum of -weight * delta over all rows.
// sink_weights() computes the weights, and cpu/backward.h explains delta.
#include "sinks_gradient.h"

#include "mlx/ops.h"

namespace flashattn {
namespace {

// A sink's weight is its softmax probability, exp(sink - row_max) / row_sum. exp(sink - lse) would be less precise,
// because in lse = row_max + log(row_sum) a large row_max rounds the logarithm away.
mx::array sink_weights(const mx::array& sinks, const Outputs& saved, const mx::array& sees_nothing,
                       const mx::Stream& s) {
  mx::array zero(0.0f), sink = mx::expand_dims(sinks, -1, s);
  Arrays stats = mx::split(*saved.row_stats, 2, -1, s);
  mx::array row_max = mx::squeeze(stats[0], -1, s), row_sum = mx::squeeze(stats[1], -1, s);
  mx::array exponent = mx::subtract(sink, row_max, s);
  mx::array weights = mx::where(sees_nothing, zero, mx::divide(mx::exp(exponent, s), row_sum, s), s);
  // The result needs the value of `weights`, but the derivative of exp(sink - lse). So `weights` has no derivative, and
  // the factor `one` is 1 with the derivative of sink - lse.
  mx::array logits = mx::subtract(sink, *saved.lse, s);
  logits = mx::where(mx::isfinite(logits, s), logits, zero, s);
  mx::array one = mx::exp(mx::subtract(logits, mx::stop_gradient(logits, s), s), s);
  return mx::multiply(mx::stop_gradient(weights, s), one, s);
}

}  // namespace

mx::array sinks_gradient(const mx::array& sinks, const Outputs& saved, const mx::array& delta,
                         const mx::Stream& stream) {
  mx::array sees_nothing = mx::isneginf(*saved.lse, stream);
  mx::array weights = sink_weights(sinks, saved, sees_nothing, stream);
  mx::array terms = mx::negative(mx::multiply(weights, delta, stream), stream);
  // In a row that sees nothing the weight is 0, but delta may be NaN, and 0 * NaN is NaN.
  terms = mx::where(sees_nothing, mx::array(0.0f), terms, stream);
  if (stream.device == mx::Device::cpu) {
    // float64, because on the CPU MLX adds one term after the other, so the error of a float32 sum grows with L. On the
    // GPU, MLX sums in a tree, so float32 is enough.
    terms = mx::astype(terms, mx::float64, stream);
  }
  mx::array gradient = mx::sum(terms, -1, false, stream);
  std::vector<int> broadcast;  // dimensions along which `sinks` is broadcast
  int missing = static_cast<int>(gradient.ndim() - sinks.ndim());
  for (int axis = 0; axis < static_cast<int>(gradient.ndim()); ++axis) {
    if (axis < missing || (sinks.shape(axis - missing) == 1 && gradient.shape(axis) != 1)) {
      broadcast.push_back(axis);
    }
  }
  gradient = mx::astype(mx::sum(gradient, broadcast, false, stream), sinks.dtype(), stream);
  return mx::reshape(gradient, sinks.shape(), stream);
}

}  // namespace flashattn
