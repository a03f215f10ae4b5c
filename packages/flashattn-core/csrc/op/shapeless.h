// MLX's operations in shapeless functions: mx.compile(shapeless=True) and mx.export_function(shapeless=True). MLX
// traces such a function once, and calls each operation's output_shapes() when the shapes change. But many operations
// keep shapes of the first call. Those in this file do not, and their derivatives do not.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace flashattn {

namespace mx = mlx::core;

// Whether MLX traces a shapeless function now.
bool is_shapeless();

// The size of a negative axis.
mx::array size_of(const mx::array& tensor, int axis, mx::Dtype dtype, mx::StreamOrDevice s);

// Returns the int32 numbers 0, 1, 2 and so on for a negative axis of `tensor`; in reverse order if `after` is true.
mx::array numbered(const mx::array& tensor, int axis, bool after, mx::StreamOrDevice s);

// Returns array[..., indices, ...] along a negative axis. Indices beyond the ends count as the first or the last index.
// `indices` has this axis and those after it.
mx::array taken(const mx::array& array, mx::array indices, int axis, mx::StreamOrDevice s);

// mx::any() of two concatenated copies of the array, because MLX 0.32.4 crashes if a shapeless function reduces only
// axes of one element. It has no derivative.
mx::array any_of(const mx::array& array, const std::vector<int>& axes, bool keep, mx::StreamOrDevice s);

}  // namespace flashattn
