// Stands in for <metal_simdgroup>. When all 32 lanes have reached an operation, its exchange function runs once.
#pragma once

// An exchange function moves values between the lanes' stacks. These accesses are not checked, because the kernel does
// not make them.
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
  static METAL_FUNC bool apply(bool a, bool b) { return a && b; }
};
// Reduces the values of all lanes in a balanced tree. Every lane gets the result.
template <class T, class Operator>
MSL_EXCHANGE void reduce(MslLane* lanes) {
  T values[kLanes];
  for (int i = 0; i < kLanes; i++) values[i] = *(const T*)lanes[i].input;
  for (int count = kLanes / 2; count > 0; count /= 2) {
    for (int i = 0; i < count; i++) values[i] = Operator::apply(values[2 * i], values[2 * i + 1]);
  }
  for (int i = 0; i < kLanes; i++) *(T*)lanes[i].output = values[0];
}

// In Metal, the value from a lane beyond the SIMD group is undefined. Here all bits of such a value are set.
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

template <class T>
METAL_FUNC T meet(const MslOperation* operation, T value, long argument, const char* file, int line) {
  static_assert(!vector_traits<T>::is_vector, "a vector would be as many operations as it has elements");
  T result;
  msl_simdgroup_operation(operation, &value, &result, argument, file, line);
  return result;
}
template <class T>
METAL_FUNC T simd_sum(T value, MSL_PLACE) {
  static constexpr MslOperation operation{"simd_sum", kCountReduction, reduce<T, Add>};
  return meet(&operation, value, 0, file, line);
}
template <class T>
METAL_FUNC T simd_max(T value, MSL_PLACE) {
  static constexpr MslOperation operation{"simd_max", kCountReduction, reduce<T, Maximum>};
  return meet(&operation, value, 0, file, line);
}
METAL_FUNC bool simd_all(bool value, MSL_PLACE) {
  static constexpr MslOperation operation{"simd_all", kCountReduction, reduce<bool, And>};
  return meet(&operation, value, 0, file, line);
}
template <class T>
METAL_FUNC T simd_shuffle(T value, ushort lane, MSL_PLACE) {
  static constexpr MslOperation operation{"simd_shuffle", kCountShuffle, shuffle<T, false>};
  return meet(&operation, value, lane, file, line);
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T value, ushort mask, MSL_PLACE) {
  static constexpr MslOperation operation{"simd_shuffle_xor", kCountShuffle, shuffle<T, true>};
  return meet(&operation, value, mask, file, line);
}
}  // namespace metal
