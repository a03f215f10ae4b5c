// <metal_atomic>. Kernels run in one OS thread, so plain operations are atomic; the runtime is told of each access.
#pragma once

#define MSL_ATOMIC __attribute__((noinline, no_sanitize("thread")))

namespace metal {
enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

#define MSL_ATOMIC_UPDATE(name, result)                                    \
  template <class T, class U>                                              \
  MSL_ATOMIC T name(volatile atomic<T>* object, U operand, memory_order) { \
    msl_atomic_access(&object->value, sizeof(T), true);                    \
    const T old = object->value;                                           \
    object->value = result;                                                \
    return old;                                                            \
  }
MSL_ATOMIC_UPDATE(atomic_fetch_add_explicit, old + (T)operand)
MSL_ATOMIC_UPDATE(atomic_fetch_sub_explicit, old - (T)operand)
MSL_ATOMIC_UPDATE(atomic_fetch_max_explicit, max(old, (T)operand))
MSL_ATOMIC_UPDATE(atomic_fetch_min_explicit, min(old, (T)operand))
MSL_ATOMIC_UPDATE(atomic_fetch_and_explicit, old&(T)operand)
MSL_ATOMIC_UPDATE(atomic_fetch_or_explicit, old | (T)operand)
MSL_ATOMIC_UPDATE(atomic_fetch_xor_explicit, old ^ (T)operand)
MSL_ATOMIC_UPDATE(atomic_exchange_explicit, (T)operand)
#undef MSL_ATOMIC_UPDATE

template <class T>
MSL_ATOMIC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  msl_atomic_access(&object->value, sizeof(T), false);
  return object->value;
}
template <class T, class U>
MSL_ATOMIC void atomic_store_explicit(volatile atomic<T>* object, U operand, memory_order) {
  msl_atomic_access(&object->value, sizeof(T), true);
  object->value = (T)operand;
}
template <class T>
MSL_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected, T desired, memory_order,
                                                      memory_order) {
  msl_atomic_access(&object->value, sizeof(T), true);
  const bool is_equal = object->value == *expected;
  if (is_equal) {
    object->value = desired;
  } else {
    *expected = object->value;
  }
  return is_equal;
}
}  // namespace metal
