// Vector construction and conversion.
#pragma once

namespace metal {
// translate.py replaces `float2(a, b)` in the kernels' text by `metal::make<float2>(a, b)`, because clang's vectors
// have no such constructor. Clang's casts between vectors of equal size keep the bits and convert no values.
template <class V, class... Elements>
METAL_FUNC constexpr V make(Elements... elements) {
  static_assert(sizeof...(Elements) == vector_traits<V>::size, "a vector needs as many values as it has elements");
  return V{(element_t<V>)elements...};
}
template <class V, class Part>
METAL_FUNC constexpr V make(Part part) {
  V result{};
  for (int i = 0; i < vector_traits<V>::size; i++) {
    if constexpr (vector_traits<Part>::is_vector) {
      static_assert(vector_traits<Part>::size == vector_traits<V>::size, "vectors of different sizes");
      result[i] = (element_t<V>)part[i];
    } else {
      result[i] = (element_t<V>)part;
    }
  }
  return result;
}
}  // namespace metal
