// Replaces MLX's header, which overloads on address spaces: those are erased where kernels run on the CPU. Defines only
// what MLX's attention kernels use.
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
