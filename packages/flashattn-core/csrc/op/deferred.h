// Graphs of MLX's operations in shapeless functions, see shapeless.h.
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

}  // namespace flashattn
