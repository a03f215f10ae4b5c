// The sinks' gradient, which MLX's operations compute from what the kernels leave.
#pragma once

#include "../request/strides.h"

namespace flashattn {

// `saved`: of the forward pass. `delta`: of its gradient, see cpu/backward.h.
mx::array sinks_gradient(const mx::array& sinks, const Outputs& saved, const mx::array& delta,
                         const mx::Stream& stream);

}  // namespace flashattn
