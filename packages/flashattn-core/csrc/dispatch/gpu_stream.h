// Queues work on MLX's GPU stream.
#pragma once

#include "../gpu/work.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

// Queues the work. Its launches must be for the stream's backend.
void run_on_gpu(const gpu::Work& work, const mx::Stream& stream);

}  // namespace flashattn
