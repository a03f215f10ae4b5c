// In place of MLX's, which overloads on address spaces, and those are erased where kernels run on the CPU: what its
// attention kernels use of it.
#pragma once
#include <metal_stdlib>

#include "mlx/backend/metal/kernels/defines.h"
using namespace metal;

template <typename T>
struct Limits {
  static constexpr constant T min = -numeric_limits<T>::infinity();
  static constexpr constant T finite_min = -numeric_limits<T>::max();
};

template <typename T, typename U>
T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}
