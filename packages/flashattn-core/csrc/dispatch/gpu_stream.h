// Queues work on MLX's GPU stream.
#pragma once

#include "../cuda/encode.h"
#include "../metal/encode.h"
#include "../request/arguments.h"

namespace flashattn {

// Queues the work. Its launches must be for the stream's backend.
inline void run_on_gpu(const gpu::Work& work, const mx::Stream& stream) {
  backend_of(stream.device) == Backend::metal ? metal::encode(work, stream) : cuda::encode(work, stream);
}

}  // namespace flashattn
