// <metal_type_traits>: the traits that kernels use.
#pragma once

namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr constant T value = v;
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
using remove_addrspace_t = __remove_cv(T);  // there is no address space to remove: see keywords.h
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T, class U>
constexpr constant bool is_same_v = __is_same(T, U);

// The element type and the number of elements of a scalar or a vector.
template <class V>
struct vector_traits {
  using element = V;
  static constexpr constant int size = 1;
  static constexpr constant bool is_vector = false;
};
template <class T, int N>
struct vector_traits<T __attribute__((ext_vector_type(N)))> {
  using element = T;
  static constexpr constant int size = N;
  static constexpr constant bool is_vector = true;
};
template <class V>
using element_t = typename vector_traits<V>::element;
}  // namespace metal
