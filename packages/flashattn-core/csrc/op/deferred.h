// Graphs of MLX's operations in shapeless functions, see shapeless.h, and their derivatives.
#pragma once

#include <functional>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

// Returns function(inputs), which must build a graph on `stream` from these inputs alone. While MLX compiles a
// shapeless function, the graph becomes one primitive, which builds the graph anew for the shapes of each call. MLX
// cannot export such a primitive, so an exported function gets the graph itself.
std::vector<mx::array> deferred(const Function& function, const std::vector<mx::array>& inputs,
                                const mx::Stream& stream);

// Differentiate a function that is made of MLX's operations. Integers and booleans have no derivative: vjp_of() returns
// zeros for them, and jvp_of() ignores their tangents. `function` must build its graph on `stream`, see deferred().
std::vector<mx::array> vjp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& cotangents, const std::vector<int>& argnums,
                              const mx::Stream& stream);
std::vector<mx::array> jvp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& tangents, const std::vector<int>& argnums,
                              const mx::Stream& stream);

}  // namespace flashattn
