// Replaces encode.cpp and driver.cpp on macOS, and for releases of MLX that do not export CUDA's encoder.
#include <string>

#include "../call/choose.h"
#include "../gpu/encode.h"
#include "driver.h"
#include "mlx/version.h"

namespace flashattn::cuda {

#define FLASHATTN_MISSING(function)                                                                                   \
  function {                                                                                                          \
    throw NoKernelError(                                                                                              \
        "[flash_attention] the CUDA kernels need mlx " FLASHATTN_OLDEST_MLX_WITH_CUDA " or newer, but this is mlx " + \
        std::string(mx::version()) + ": pip install 'mlx[cuda13]==" FLASHATTN_OLDEST_MLX_WITH_CUDA "', or [cuda12]"); \
  }
FLASHATTN_MISSING(void encode(const gpu::Work&, mx::Stream))
FLASHATTN_MISSING(void allocate(mx::array&, mx::Stream))
FLASHATTN_MISSING(void check_device(int))
FLASHATTN_MISSING(CUfunction function_of(const gpu::Launch&, int))
FLASHATTN_MISSING(std::string describe(int))
FLASHATTN_MISSING(Device properties(int))

void release_scratch() {}

}  // namespace flashattn::cuda
