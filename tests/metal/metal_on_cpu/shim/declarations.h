// SIMD groups and atomics for the address-space check: declarations only.
#pragma once

namespace metal {
#define MSL_REDUCTION(name) \
  template <class T>        \
  T name(T value);
MSL_REDUCTION(simd_sum)
MSL_REDUCTION(simd_product)
MSL_REDUCTION(simd_max)
MSL_REDUCTION(simd_min)
MSL_REDUCTION(simd_and)
MSL_REDUCTION(simd_or)
MSL_REDUCTION(simd_xor)
MSL_REDUCTION(quad_sum)
MSL_REDUCTION(quad_product)
MSL_REDUCTION(quad_max)
MSL_REDUCTION(quad_min)
MSL_REDUCTION(simd_prefix_inclusive_sum)
MSL_REDUCTION(simd_prefix_exclusive_sum)
MSL_REDUCTION(simd_prefix_inclusive_product)
MSL_REDUCTION(simd_prefix_exclusive_product)
MSL_REDUCTION(simd_broadcast_first)
#undef MSL_REDUCTION

#define MSL_SHUFFLE(name) \
  template <class T>      \
  T name(T value, ushort lane);
MSL_SHUFFLE(simd_shuffle)
MSL_SHUFFLE(simd_broadcast)
MSL_SHUFFLE(simd_shuffle_xor)
MSL_SHUFFLE(simd_shuffle_down)
MSL_SHUFFLE(simd_shuffle_up)
MSL_SHUFFLE(simd_shuffle_rotate_down)
MSL_SHUFFLE(simd_shuffle_rotate_up)
MSL_SHUFFLE(quad_shuffle)
MSL_SHUFFLE(quad_broadcast)
MSL_SHUFFLE(quad_shuffle_xor)
MSL_SHUFFLE(quad_shuffle_down)
MSL_SHUFFLE(quad_shuffle_up)
#undef MSL_SHUFFLE

template <class T>
T simd_shuffle_and_fill_up(T value, T filling, ushort delta);
template <class T>
T simd_shuffle_and_fill_down(T value, T filling, ushort delta);

bool simd_any(bool value);
bool simd_all(bool value);
bool quad_any(bool value);
bool quad_all(bool value);

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T diagonal);
  thread vec<T, 2>& thread_elements();
  const thread vec<T, 2>& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

#define MSL_MOVES(space)                                                                                        \
  template <class T>                                                                                            \
  void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& matrix, const space T* source, ulong per_row = 8,       \
                      ulong2 origin = (ulong2)(0), bool transpose = false);                                     \
  template <class T>                                                                                            \
  void simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& matrix, space T* destination, ulong per_row = 8, \
                       ulong2 origin = (ulong2)(0), bool transpose = false);
MSL_MOVES(device)
MSL_MOVES(threadgroup)
#undef MSL_MOVES

template <class T, int Rows, int Columns = Rows>
simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
                                   const thread simdgroup_matrix<B, 8, 8>& b,
                                   const thread simdgroup_matrix<C, 8, 8>& c);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
                        const thread simdgroup_matrix<B, 8, 8>& b);

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

#define MSL_ATOMIC(name, space) \
  template <class T, class U>   \
  T name(volatile space atomic<T>* object, U operand, memory_order);
#define MSL_ATOMICS(space)                     \
  MSL_ATOMIC(atomic_fetch_add_explicit, space) \
  MSL_ATOMIC(atomic_fetch_sub_explicit, space) \
  MSL_ATOMIC(atomic_fetch_max_explicit, space) \
  MSL_ATOMIC(atomic_fetch_min_explicit, space) \
  MSL_ATOMIC(atomic_fetch_and_explicit, space) \
  MSL_ATOMIC(atomic_fetch_or_explicit, space)  \
  MSL_ATOMIC(atomic_fetch_xor_explicit, space) \
  MSL_ATOMIC(atomic_exchange_explicit, space)  \
  MSL_ATOMIC(atomic_store_explicit, space)     \
  template <class T>                           \
  T atomic_load_explicit(const volatile space atomic<T>* object, memory_order);
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
#undef MSL_ATOMICS
#undef MSL_ATOMIC
}  // namespace metal

#define is_function_constant_defined(name) true
