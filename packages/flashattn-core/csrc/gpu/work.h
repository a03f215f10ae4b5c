// A call that is ready for MLX's GPU backends: its launches, and the arrays of their arguments.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "launch.h"
#include "mlx/array.h"

namespace flashattn::gpu {

struct Work {
  std::shared_ptr<const Launches> launches;
  std::array<std::optional<mlx::core::array>, kNumBindings> arrays;  // indexed by Binding; encode() adds the scratch
  std::vector<mlx::core::array> temporaries;                         // alive until the GPU is done
};

}  // namespace flashattn::gpu
