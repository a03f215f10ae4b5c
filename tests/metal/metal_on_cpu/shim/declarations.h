// Operations of SIMD groups for the address-space check: declarations only.
#pragma once

namespace metal {
template <class T>
T simd_sum(T value);
template <class T>
T simd_max(T value);
template <class T>
T simd_shuffle(T value, ushort lane);
template <class T>
T simd_shuffle_xor(T value, ushort mask);
bool simd_all(bool value);

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
}  // namespace metal

#define is_function_constant_defined(name) true
