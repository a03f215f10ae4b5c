// Differentiates functions that are made of MLX's operations.
#pragma once

#include <functional>
#include <vector>

#include "mlx/array.h"

namespace flashattn {

namespace mx = mlx::core;

using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

// Integers and booleans have no derivative. vjp_of() returns zeros for them, and jvp_of() ignores their tangents. Both
// return lazy arrays.
std::vector<mx::array> vjp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& cotangents, const std::vector<int>& argnums);
std::vector<mx::array> jvp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& tangents, const std::vector<int>& argnums);

}  // namespace flashattn
