// Derivatives of functions that are made of MLX's operations, in the form in which primitives are asked for theirs.
#pragma once

#include <functional>
#include <vector>

#include "mlx/array.h"

namespace flashattn {

namespace mx = mlx::core;

using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

// As mx::Primitive::vjp() and jvp(). Whole numbers and booleans have no derivative: what comes back for one is zeros,
// and its tangent is ignored. Nothing is computed before somebody evaluates the results.
std::vector<mx::array> vjp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& cotangents, const std::vector<int>& argnums);
std::vector<mx::array> jvp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& tangents, const std::vector<int>& argnums);

}  // namespace flashattn
