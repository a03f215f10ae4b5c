// <metal_type_traits>: what kernels ask about types.
#pragma once

namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
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
using remove_pointer_t = __remove_pointer(T);
template <class T>
struct without_address_space {
  using type = T;
};
#ifdef MSL_CHECK_ADDRESS_SPACES
template <class T>
struct without_address_space<__private T> {
  using type = T;
};
template <class T>
struct without_address_space<__global T> {
  using type = T;
};
template <class T>
struct without_address_space<__local T> {
  using type = T;
};
template <class T>
struct without_address_space<__constant T> {
  using type = T;
};
#endif
template <class T>
using remove_addrspace_t = typename without_address_space<__remove_cv(T)>::type;

#define MSL_TRAIT(name, condition)              \
  template <class T>                            \
  constexpr constant bool name##_v = condition; \
  template <class T>                            \
  struct name : bool_constant<(condition)> {};
MSL_TRAIT(is_integral, __is_integral(T))
MSL_TRAIT(is_floating_point,
          __is_floating_point(T) || __is_same(__remove_cv(T), half) || __is_same(__remove_cv(T), bfloat))
#undef MSL_TRAIT

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
