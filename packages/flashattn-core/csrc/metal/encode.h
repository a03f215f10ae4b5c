// One call as MLX's Metal backend takes it. encode.cpp is compiled where MLX has Metal, no_metal.cpp elsewhere.
#pragma once

#include <array>
#include <optional>

#include "launch.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace flashattn::metal {

namespace mx = mlx::core;

struct Work {
  gpu::Launches launches;
  std::array<std::optional<mx::array>, gpu::kNumBindings> arrays;  // by binding; scratch is encode()'s
  std::vector<mx::array> temporaries;                              // alive until the GPU is done
};

// Puts the launches into the stream's command encoder. Arrays are read and written in place, through their strides.
void encode(const Work& work, mx::Stream stream);

}  // namespace flashattn::metal
