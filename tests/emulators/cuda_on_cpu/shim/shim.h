// Defines in plain C++ what NVRTC offers without any header, and PTX's instructions as functions.
#pragma once

#include "../runtime/cuda.h"
#include "abi.h"

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

#define CUDA_FUNC inline __attribute__((always_inline))
#define CUDA_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

#include "built_in.h"
#include "hopper.h"
#include "instructions.h"
