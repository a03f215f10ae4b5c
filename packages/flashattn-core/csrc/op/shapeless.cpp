// Builds numbers as a cumulative sum of ones, because mx::arange() keeps its size.
#include "shapeless.h"

#include "mlx/ops.h"

namespace flashattn {

bool is_shapeless() {
  // Elsewhere MLX knows the number of elements, and returns a constant.
  return mx::number_of_elements(mx::array(0), {}, false, mx::int32).has_primitive();
}

mx::array size_of(const mx::array& tensor, int axis, mx::Dtype dtype, mx::StreamOrDevice s) {
  // MLX's NumberOfElements has no jvp.
  return mx::number_of_elements(mx::stop_gradient(tensor, s), {axis}, false, dtype, s);
}

mx::array numbered(const mx::array& tensor, int axis, bool after, mx::StreamOrDevice s) {
  std::vector<int> others;
  for (int other = -static_cast<int>(tensor.ndim()); other < 0; ++other) {
    if (other != axis) {
      others.push_back(other);
    }
  }
  mx::array any = any_of(mx::stop_gradient(tensor, s), others, false, s);
  mx::array ones = mx::astype(mx::logical_or(any, mx::logical_not(any, s), s), mx::int32, s);
  return mx::cumsum(ones, 0, after, /*inclusive=*/false, s);
}

mx::array taken(const mx::array& array, mx::array indices, int axis, mx::StreamOrDevice s) {
  mx::array last = mx::subtract(size_of(array, axis, mx::int32, s), mx::array(1), s);
  indices = mx::clip(indices, mx::array(0), last, s);
  while (indices.ndim() < array.ndim()) {
    indices = mx::expand_dims(indices, 0, s);
  }
  return mx::take_along_axis(array, indices, axis, s);
}

mx::array any_of(const mx::array& array, const std::vector<int>& axes, bool keep, mx::StreamOrDevice s) {
  return mx::any(mx::concatenate({array, array}, axes.back(), s), axes, keep, s);
}

}  // namespace flashattn
