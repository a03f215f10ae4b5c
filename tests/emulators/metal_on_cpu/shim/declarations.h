// Declares the operations of SIMD groups. The check of address spaces needs no definitions.
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
  thread vec<T, 2>& thread_elements();
  const thread vec<T, 2>& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
void simdgroup_multiply_accumulate(thread simdgroup_float8x8& d, const thread simdgroup_float8x8& a,
                                   const thread simdgroup_float8x8& b, const thread simdgroup_float8x8& c);
}  // namespace metal
