// Graphs of MLX's operations in shapeless functions, see shapeless.h, and their derivatives.
#pragma once

#include <functional>
#include <vector>

#include "../request/arguments.h"

namespace flashattn {

using Function = std::function<Arrays(const Arrays&)>;

// Returns function(inputs), which must build a graph on `stream` from these inputs alone. While MLX compiles a
// shapeless function, the graph becomes one primitive, which builds the graph anew for the shapes of each call. MLX
// cannot export such a primitive, so an exported function gets the graph itself.
Arrays deferred(const Function& function, const Arrays& inputs, const mx::Stream& stream);

// Differentiate a function that is made of MLX's operations. Integers and booleans have no derivative: vjp_of() returns
// zeros for them, and jvp_of() ignores their tangents. `function` must build its graph on `stream`, see deferred().
Arrays vjp_of(const Function& function, const Arrays& primals, const Arrays& cotangents,
              const std::vector<int>& argnums, const mx::Stream& stream);
Arrays jvp_of(const Function& function, const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums,
              const mx::Stream& stream);

}  // namespace flashattn
