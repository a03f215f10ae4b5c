// Replaces MLX's header, which has an overload for each address space. On the CPU, kernels have no address spaces. This
// file defines only what MLX's attention kernels use.
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
