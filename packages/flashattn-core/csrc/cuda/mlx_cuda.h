// Declares the part of libmlx's CUDA backend that this module uses. MLX's header would need the CUDA toolkit's headers,
// which users need not have. The declarations have the same mangled names as MLX's, and are weak. No code calls them if
// mx::cu::is_available() is false. No compiler compares this file with MLX, but `make follow` looks for the symbols in
// each release of MLX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "libraries.h"
#include "mlx/array.h"
#include "mlx/stream.h"

// Declared as in CUDA's own headers.
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace mlx::core::cu {

// An array's buffer().ptr() points to this struct. Only the member that this module reads is declared.
struct CudaBuffer {
  void* data;
};

// Only MLX constructs this class, so its members and its size do not matter here.
class CommandEncoder {
 public:
  CommandEncoder() = delete;

  // These two declare the arrays that the next kernel reads and writes. The next kernel runs after the last kernel that
  // wrote one of these arrays.
  FLASHATTN_WEAK void set_input_array(const array& input);
  FLASHATTN_WEAK void set_output_array(const array& output);
  // Adds a kernel, and copies its parameters before it returns.
  FLASHATTN_WEAK void add_kernel_node_raw(CUfunction function, dim3 grid, dim3 block, dim3 cluster,
                                          uint32_t dynamic_shared, void** parameters);
  // While a ConcurrentContext lives, the kernels that are added do not wait for each other. Later kernels wait for all
  // of them.
  struct ConcurrentContext {
    FLASHATTN_WEAK ConcurrentContext(CommandEncoder& encoder);
    FLASHATTN_WEAK ~ConcurrentContext();
    CommandEncoder& encoder;
  };
  // The task runs after all kernels of the current commit, including kernels that are added after this call.
  FLASHATTN_WEAK void add_completed_handler(std::function<void()> task);
};

FLASHATTN_WEAK CommandEncoder& get_command_encoder(Stream stream);

}  // namespace mlx::core::cu
