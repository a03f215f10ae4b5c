// A call that is ready for MLX's GPU backends, and the functions that hand it to them. They are in each backend's
// encode.cpp, which no_metal.cpp or no_cuda.cpp replaces if MLX lacks the backend.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "launch.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace flashattn {

namespace mx = mlx::core;

namespace gpu {

struct Work {
  std::shared_ptr<const Launches> launches;
  std::array<std::optional<mx::array>, kNumBindings> arrays;  // indexed by Binding; encode() adds the scratch
  std::vector<mx::array> temporaries;                         // alive until the GPU is done
};

}  // namespace gpu

// encode() adds the work's launches to the stream's encoder. Kernels read and write arrays in place, through their
// strides.
namespace metal {
void encode(const gpu::Work& work, mx::Stream stream);
}
namespace cuda {
void encode(const gpu::Work& work, mx::Stream stream);

// Allocates the array's GPU memory in the order of the stream, as MLX's own ops do.
void allocate(mx::array& output, mx::Stream stream);

// Frees the scratch that the calling thread keeps for later calls. Calls that still run keep their scratch until they
// end.
void release_scratch();
}  // namespace cuda

}  // namespace flashattn
