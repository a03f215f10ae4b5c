// Vector construction, conversion and the functions that work on whole vectors.
#pragma once

namespace metal {
// `float4(a, b2, c)` of the kernels' text is rewritten to `metal::make<float4>(a, b2, c)`: clang's vectors have no such
// constructor, and a cast between vectors of the same size keeps the bits instead of converting the values.
#ifdef MSL_CHECK_ADDRESS_SPACES
template <class V, class... Parts>
constexpr V make(Parts... parts) {
  return V();
}
#else
template <class V>
METAL_FUNC constexpr V make() {
  return V{};
}

template <class V, class Part>
METAL_FUNC constexpr V make(Part part) {
  using E = element_t<V>;
  if constexpr (!vector_traits<V>::is_vector || __is_class(Part)) {  // a class: of the packed vectors
    return (V)part;
  } else {
    V result{};
    if constexpr (vector_traits<Part>::is_vector) {
      static_assert(vector_traits<Part>::size == vector_traits<V>::size, "vectors of different sizes");
      for (int i = 0; i < vector_traits<V>::size; i++) result[i] = (E)part[i];
    } else {
      for (int i = 0; i < vector_traits<V>::size; i++) result[i] = (E)part;
    }
    return result;
  }
}

template <class V, class Part>
METAL_FUNC constexpr void append(V& result, int& position, Part part) {
  if constexpr (vector_traits<Part>::is_vector) {
    for (int i = 0; i < vector_traits<Part>::size; i++) result[position++] = (element_t<V>)part[i];
  } else {
    result[position++] = (element_t<V>)part;
  }
}

template <class V, class First, class Second, class... Rest>
METAL_FUNC constexpr V make(First first, Second second, Rest... rest) {
  static_assert(vector_traits<First>::size + vector_traits<Second>::size + (0 + ... + vector_traits<Rest>::size) ==
                    vector_traits<V>::size,
                "a vector needs as many values as it has elements");
  V result{};
  int position = 0;
  append(result, position, first);
  append(result, position, second);
  (append(result, position, rest), ...);
  return result;
}
#endif

template <class To, class From>
METAL_FUNC constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between different sizes");
  return __builtin_bit_cast(To, from);
}

template <class T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
METAL_FUNC bool any(vec<T, N> v) {
  bool result = false;
  for (int i = 0; i < N; i++) result |= (bool)v[i];
  return result;
}
template <class T, int N>
METAL_FUNC bool all(vec<T, N> v) {
  bool result = true;
  for (int i = 0; i < N; i++) result &= (bool)v[i];
  return result;
}
template <class T>
METAL_FUNC T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}
template <class T, int N, class B>
METAL_FUNC vec<T, N> select(vec<T, N> if_false, vec<T, N> if_true, vec<B, N> condition) {
  for (int i = 0; i < N; i++) if_false[i] = condition[i] ? if_true[i] : if_false[i];
  return if_false;
}
}  // namespace metal
