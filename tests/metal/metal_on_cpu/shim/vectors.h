// Vector construction and conversion.
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
  if constexpr (!vector_traits<V>::is_vector) {
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

}  // namespace metal
