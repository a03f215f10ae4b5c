// Differentiates functions that are made of MLX's operations.
#pragma once

#include <vector>

#include "deferred.h"

namespace flashattn {

// Integers and booleans have no derivative. vjp_of() returns zeros for them, and jvp_of() ignores their tangents. Both
// return lazy arrays. `function` must build its graph on `stream`, see deferred().
std::vector<mx::array> vjp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& cotangents, const std::vector<int>& argnums,
                              const mx::Stream& stream);
std::vector<mx::array> jvp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& tangents, const std::vector<int>& argnums,
                              const mx::Stream& stream);

}  // namespace flashattn
