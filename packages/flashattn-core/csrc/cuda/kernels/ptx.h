// Functions for PTX instructions that CUDA C++ lacks: asynchronous copies, and the tensor cores' instructions.
#pragma once

#include "dialect.h"

namespace flashattn {

// Addresses in shared memory have only 32 bits, so computing with them costs half as much as with 64-bit pointers.
FLASHATTN_FUNC uint shared_address(const void* pointer) {
  return uint(__cvta_generic_to_shared(pointer));
}
FLASHATTN_FUNC void* shared_pointer(uint address) {
  return __cvta_shared_to_generic(address);
}

// Copies `bytes` bytes to shared memory, and writes zeros after them, 16 bytes in all. Both addresses must be multiples
// of 16.
FLASHATTN_FUNC void copy_async(uint to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
FLASHATTN_FUNC void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most N of this thread's committed groups of copies are unfinished.
template <int N>
FLASHATTN_FUNC void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#define FLASHATTN_LOAD(name, INSTRUCTION)                                                                              \
  FLASHATTN_FUNC void name(uint(&r)[4], uint from) {                                                                   \
    asm volatile(INSTRUCTION " {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from)); \
  }
FLASHATTN_LOAD(load_four, "ld.shared.v4.b32")
// Loads four matrices with 8 rows of 16 bytes. Lane n passes the address of row n % 8 of matrix n / 8. From row n / 4
// of each matrix, it gets the four bytes that begin at byte 4 * (n % 4).
FLASHATTN_LOAD(load_matrices, "ldmatrix.sync.aligned.m8n8.x4.shared.b16")
// Loads four matrices of 16-bit elements and transposes them. From column n / 4 of each matrix, lane n gets the
// elements in rows 2 * (n % 4) and 2 * (n % 4) + 1.
FLASHATTN_LOAD(load_matrices_transposed, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
#undef FLASHATTN_LOAD

// Transposes an 8 x 8 matrix of 16-bit elements. Lane n holds the elements in columns 2 * (n % 4) and 2 * (n % 4) + 1
// of row n / 4.
FLASHATTN_FUNC uint transposed(uint pair) {
  uint result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// A lane's four elements of a matrix of 16 rows and 8 columns. Lane n has columns 2 * (n % 4) + {0, 1}: first those of
// row n / 4, then those of row n / 4 + 8.
typedef float Fragment[4];

// c += a b, where b has 8 columns. Lane n holds these elements: in a, columns k of the rows n / 4 and n / 4 + 8; in b,
// rows k of column n / 4. For 16-bit floats, a is 16 x 16, and k is 2 * (n % 4) + {0, 1, 8, 9}. For float32, which is
// truncated to TF32, a is 16 x 8, and k is n % 4 + {0, 4}.
template <typename T>
FLASHATTN_FUNC void multiply_add_tile(Fragment& c, const uint (&a)[4], uint b0, uint b1);
#define FLASHATTN_MMA(T, SHAPE)                                                                      \
  template <>                                                                                        \
  FLASHATTN_FUNC void multiply_add_tile<T>(Fragment & c, const uint(&a)[4], uint b0, uint b1) {      \
    asm("mma.sync.aligned." SHAPE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                             \
  }
FLASHATTN_MMA(bfloat, "m16n8k16.row.col.f32.bf16.bf16.f32")
FLASHATTN_MMA(half, "m16n8k16.row.col.f32.f16.f16.f32")
FLASHATTN_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef FLASHATTN_MMA

// Rounds two floats to 16 bits, and puts them into one register, with `low` in its low half.
template <typename T>
FLASHATTN_FUNC uint rounded_pair(float low, float high);
#define FLASHATTN_ROUNDED_PAIR(T, TYPES)                                        \
  template <>                                                                   \
  FLASHATTN_FUNC uint rounded_pair<T>(float low, float high) {                  \
    uint pair;                                                                  \
    asm("cvt.rn." TYPES ".f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low)); \
    return pair;                                                                \
  }
FLASHATTN_ROUNDED_PAIR(bfloat, "bf16x2")
FLASHATTN_ROUNDED_PAIR(half, "f16x2")
#undef FLASHATTN_ROUNDED_PAIR

}  // namespace flashattn
