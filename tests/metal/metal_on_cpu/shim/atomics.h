// <metal_atomic>. Kernels run in one OS thread, so a load and a store are atomic together; the runtime is told of both.
#pragma once

namespace metal {
enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

// Atomic for the compiler as well: it instruments plain accesses only.
template <class T>
METAL_FUNC T atomic_value(const volatile atomic<T>* object) {
  T value;
  __atomic_load(&object->value, &value, __ATOMIC_RELAXED);
  return value;
}
template <class T>
METAL_FUNC void set_atomic_value(volatile atomic<T>* object, T value) {
  __atomic_store(&object->value, &value, __ATOMIC_RELAXED);
}

#define MSL_ATOMIC_UPDATE(name, result)                                    \
  template <class T, class U>                                              \
  METAL_FUNC T name(volatile atomic<T>* object, U operand, memory_order) { \
    msl_atomic_access(&object->value, sizeof(T), true, true);              \
    const T old = atomic_value(object);                                    \
    set_atomic_value(object, (T)(result));                                 \
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
METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  msl_atomic_access(&object->value, sizeof(T), true, false);
  return atomic_value(object);
}
template <class T, class U>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* object, U operand, memory_order) {
  msl_atomic_access(&object->value, sizeof(T), false, true);
  set_atomic_value(object, (T)operand);
}
template <class T>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected, T desired, memory_order,
                                                      memory_order) {
  msl_atomic_access(&object->value, sizeof(T), true, true);
  const T old = atomic_value(object);
  const bool is_equal = old == *expected;
  if (is_equal) {
    set_atomic_value(object, desired);
  } else {
    *expected = old;
  }
  return is_equal;
}
}  // namespace metal
