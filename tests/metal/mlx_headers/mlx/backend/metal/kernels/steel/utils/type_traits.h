// Replaces MLX's header, which has a specialisation for each address space. On the CPU, kernels have no address spaces.
#pragma once
#include <metal_stdlib>

namespace metal {
template <typename T>
struct is_empty : bool_constant<__is_empty(T)> {};

template <typename... Ts>
using void_t = void;

template <typename T>
struct is_static : bool_constant<__is_empty(T)> {};

template <typename T>
struct pointer_element;
template <typename T>
struct pointer_element<T*> {
  using type = remove_cv_t<T>;
};
template <typename T>
using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
}  // namespace metal
