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
struct Multiply {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return a * b;
  }
};
struct Maximum {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return max(a, b);
  }
};
struct Minimum {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return min(a, b);
  }
};
struct And {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static METAL_FUNC T apply(T a, T b) {
    return a ^ b;
  }
};

// All lanes of each group of `Width` get the reduction over the group, as a balanced tree.
template <class T, class Operator, int Width>
MSL_EXCHANGE void reduce(MslLane* lanes) {
  for (int group = 0; group < kLanes; group += Width) {
    T values[Width];
    for (int i = 0; i < Width; i++) values[i] = *(const T*)lanes[group + i].input;
    for (int count = Width / 2; count > 0; count /= 2) {
      for (int i = 0; i < count; i++) values[i] = Operator::apply(values[2 * i], values[2 * i + 1]);
    }
    for (int i = 0; i < Width; i++) *(T*)lanes[group + i].output = values[0];
  }
}

template <class T, class Operator, bool IsInclusive>
MSL_EXCHANGE void scan(MslLane* lanes) {
  T total = __is_same(Operator, Multiply) ? (T)1 : (T)0;
  for (int i = 0; i < kLanes; i++) {
    const T value = *(const T*)lanes[i].input;
    const T next = Operator::apply(total, value);
    *(T*)lanes[i].output = IsInclusive ? next : total;
    total = next;
  }
}

enum class Shuffle { kIndex, kXor, kDown, kUp, kRotateDown, kRotateUp };

// What comes from beyond the group is undefined in Metal: poison for index and xor; down and up keep the lane's own.
template <class T, Shuffle Kind, int Width>
MSL_EXCHANGE void shuffle(MslLane* lanes) {
  for (int i = 0; i < kLanes; i++) {
    const int group = i & ~(Width - 1), lane = i & (Width - 1), argument = (int)lanes[i].argument;
    int source = argument;
    if (Kind == Shuffle::kXor) source = lane ^ argument;
    if (Kind == Shuffle::kDown) source = lane + argument;
    if (Kind == Shuffle::kUp) source = lane - argument;
    if (Kind == Shuffle::kRotateDown) source = (lane + argument) & (Width - 1);
    if (Kind == Shuffle::kRotateUp) source = (lane - argument) & (Width - 1);
    if (source >= 0 && source < Width) {
      *(T*)lanes[i].output = *(const T*)lanes[group + source].input;
    } else if (Kind == Shuffle::kDown || Kind == Shuffle::kUp) {
      *(T*)lanes[i].output = *(const T*)lanes[i].input;
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
MSL_REDUCTION(simd_sum, reduce<T, Add, 32>)
MSL_REDUCTION(simd_product, reduce<T, Multiply, 32>)
MSL_REDUCTION(simd_max, reduce<T, Maximum, 32>)
MSL_REDUCTION(simd_min, reduce<T, Minimum, 32>)
MSL_REDUCTION(simd_and, reduce<T, And, 32>)
MSL_REDUCTION(simd_or, reduce<T, Or, 32>)
MSL_REDUCTION(simd_xor, reduce<T, Xor, 32>)
MSL_REDUCTION(quad_sum, reduce<T, Add, 4>)
MSL_REDUCTION(quad_product, reduce<T, Multiply, 4>)
MSL_REDUCTION(quad_max, reduce<T, Maximum, 4>)
MSL_REDUCTION(quad_min, reduce<T, Minimum, 4>)
MSL_REDUCTION(simd_prefix_inclusive_sum, scan<T, Add, true>)
MSL_REDUCTION(simd_prefix_exclusive_sum, scan<T, Add, false>)
MSL_REDUCTION(simd_prefix_inclusive_product, scan<T, Multiply, true>)
MSL_REDUCTION(simd_prefix_exclusive_product, scan<T, Multiply, false>)
#undef MSL_REDUCTION

#define MSL_SHUFFLE(name, kind, width)                                                                        \
  MSL_PER_ELEMENT(T, name(T value, ushort lane, MSL_PLACE), name((element_t<T>)value[i], lane, file, line)) { \
    static constexpr MslOperation operation{#name, kCountShuffle, shuffle<T, Shuffle::kind, width>};          \
    msl_simdgroup_operation(&operation, &value, &result, lane, file, line);                                   \
  }                                                                                                           \
  return result;                                                                                              \
  }
MSL_SHUFFLE(simd_shuffle, kIndex, 32)
MSL_SHUFFLE(simd_broadcast, kIndex, 32)
MSL_SHUFFLE(simd_shuffle_xor, kXor, 32)
MSL_SHUFFLE(simd_shuffle_down, kDown, 32)
MSL_SHUFFLE(simd_shuffle_up, kUp, 32)
MSL_SHUFFLE(simd_shuffle_rotate_down, kRotateDown, 32)
MSL_SHUFFLE(simd_shuffle_rotate_up, kRotateUp, 32)
MSL_SHUFFLE(quad_shuffle, kIndex, 4)
MSL_SHUFFLE(quad_broadcast, kIndex, 4)
MSL_SHUFFLE(quad_shuffle_xor, kXor, 4)
MSL_SHUFFLE(quad_shuffle_down, kDown, 4)
MSL_SHUFFLE(quad_shuffle_up, kUp, 4)
#undef MSL_SHUFFLE
#undef MSL_PER_ELEMENT

// A shuffle up or down that takes from a second value what the first one has not.
template <class T>
struct Filled {
  T value, filling;
};
template <class T, int Step>
MSL_EXCHANGE void shuffle_and_fill(MslLane* lanes) {
  for (int i = 0; i < kLanes; i++) {
    const int source = i + Step * (int)lanes[i].argument;
    const auto& from = *(const Filled<T>*)lanes[source & (kLanes - 1)].input;
    *(T*)lanes[i].output = source >= 0 && source < kLanes ? from.value : from.filling;
  }
}
#define MSL_SHUFFLE_AND_FILL(name, step)                                                      \
  template <class T>                                                                          \
  METAL_FUNC T name(T value, T filling, ushort delta, MSL_PLACE) {                            \
    static constexpr MslOperation operation{#name, kCountShuffle, shuffle_and_fill<T, step>}; \
    const Filled<T> both{value, filling};                                                     \
    T result;                                                                                 \
    msl_simdgroup_operation(&operation, &both, &result, delta, file, line);                   \
    return result;                                                                            \
  }
MSL_SHUFFLE_AND_FILL(simd_shuffle_and_fill_up, -1)
MSL_SHUFFLE_AND_FILL(simd_shuffle_and_fill_down, 1)
#undef MSL_SHUFFLE_AND_FILL

template <class T>
METAL_FUNC T simd_broadcast_first(T value, MSL_PLACE) {
  return simd_broadcast(value, 0, file, line);
}
METAL_FUNC bool simd_any(bool value, MSL_PLACE) {
  return simd_or((int)value, file, line);
}
METAL_FUNC bool simd_all(bool value, MSL_PLACE) {
  return simd_and((int)value, file, line);
}
METAL_FUNC bool quad_any(bool value, MSL_PLACE) {
  return quad_max((int)value, file, line);
}
METAL_FUNC bool quad_all(bool value, MSL_PLACE) {
  return quad_min((int)value, file, line);
}
}  // namespace metal
