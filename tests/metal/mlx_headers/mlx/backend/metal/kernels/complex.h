// In place of MLX's, which overloads on address spaces: those are erased where kernels run on the CPU. The attention
// kernels need only the type's name.
#pragma once
#include <metal_stdlib>
#include "mlx/backend/metal/kernels/bf16.h"

template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T real, T imag) : real(real), imag(imag) {}
};
typedef complex_t<float> complex64_t;
