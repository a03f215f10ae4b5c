// <metal_simdgroup>: each operation is one meeting of the 32 lanes; its exchange function runs once, on all lanes.
#pragma once

// The exchange functions move values between the lanes' stacks: not accesses of the kernel.
#define MSL_EXCHANGE __attribute__((no_sanitize("thread")))

namespace metal {
struct Add {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return a + b;
  }
};
struct Maximum {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return max(a, b);
  }
};
struct And {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return a & b;
  }
};
// All lanes get the reduction over the SIMD group, as a balanced tree.
template <class T, class Operator>
MSL_EXCHANGE void reduce(MslLane* lanes) {
  T values[kLanes];
  for (int i = 0; i < kLanes; i++) values[i] = *(const T*)lanes[i].input;
  for (int count = kLanes / 2; count > 0; count /= 2) {
    for (int i = 0; i < count; i++) values[i] = Operator::apply(values[2 * i], values[2 * i + 1]);
  }
  for (int i = 0; i < kLanes; i++) *(T*)lanes[i].output = values[0];
}

// What comes from beyond the group is undefined in Metal: here it is poison.
template <class T, bool IsXor>
MSL_EXCHANGE void shuffle(MslLane* lanes) {
  for (int i = 0; i < kLanes; i++) {
    const unsigned long source = IsXor ? i ^ lanes[i].argument : lanes[i].argument;
    if (source < kLanes) {
      *(T*)lanes[i].output = *(const T*)lanes[source].input;
    } else {
      __builtin_memset(lanes[i].output, 0xff, sizeof(T));
    }
  }
}

// A vector is as many operations as it has elements.
#define MSL_PER_ELEMENT(T, name, call)                                   \
  template <class T>                                                     \
  METAL_FUNC T name {                                                    \
    T result;                                                            \
    if constexpr (vector_traits<T>::is_vector) {                         \
      for (int i = 0; i < vector_traits<T>::size; i++) result[i] = call; \
    } else

#define MSL_REDUCTION(name, ...)                                                           \
  MSL_PER_ELEMENT(T, name(T value, MSL_PLACE), name((element_t<T>)value[i], file, line)) { \
    static constexpr MslOperation operation{#name, kCountReduction, __VA_ARGS__};          \
    msl_simdgroup_operation(&operation, &value, &result, 0, file, line);                   \
  }                                                                                        \
  return result;                                                                           \
  }
MSL_REDUCTION(simd_sum, reduce<T, Add>)
MSL_REDUCTION(simd_max, reduce<T, Maximum>)
MSL_REDUCTION(simd_and, reduce<T, And>)
#undef MSL_REDUCTION

#define MSL_SHUFFLE(name, ...)                                                                                \
  MSL_PER_ELEMENT(T, name(T value, ushort lane, MSL_PLACE), name((element_t<T>)value[i], lane, file, line)) { \
    static constexpr MslOperation operation{#name, kCountShuffle, __VA_ARGS__};                               \
    msl_simdgroup_operation(&operation, &value, &result, lane, file, line);                                   \
  }                                                                                                           \
  return result;                                                                                              \
  }
MSL_SHUFFLE(simd_shuffle, shuffle<T, false>)
MSL_SHUFFLE(simd_shuffle_xor, shuffle<T, true>)
#undef MSL_SHUFFLE
#undef MSL_PER_ELEMENT

METAL_FUNC bool simd_all(bool value, MSL_PLACE) {
  return simd_and((int)value, file, line);
}
}  // namespace metal
