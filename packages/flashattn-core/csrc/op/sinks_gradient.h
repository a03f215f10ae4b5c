// The gradient of sinks, which MLX's operations compute from the kernels' outputs.
#pragma once

#include "../request/strides.h"

namespace flashattn {

// `saved`: the forward pass's outputs. `delta`: the backward kernels' output, see cpu/backward.h.
mx::array sinks_gradient(const mx::array& sinks, const Outputs& saved, const mx::array& delta,
                         const mx::Stream& stream);

}  // namespace flashattn
