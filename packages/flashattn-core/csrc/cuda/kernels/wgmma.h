// Products of a warpgroup, four warps with 64 rows, on the tensor cores of compute capability 9.0. They run on while the
// warpgroup goes on, and read their second operand, and the first where it is not in registers, from shared memory.
//
// A warp has its 16 rows of the result as mma.sync gives them, see tile_products.h.
#pragma once

#include "tile_products.h"

namespace flashattn {

constexpr int kWarpgroup = 4 * FLASHATTN_LANES, kWarpgroupRows = 4 * kWarpRows;

// In front of products: what was written to their registers, and to shared memory by ordinary stores, is there.
FLASHATTN_FUNC void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
FLASHATTN_FUNC void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most N of the groups committed are under way. The compiler must not move a use of their results above it.
template <int N, int COUNT>
FLASHATTN_FUNC void wait_for_products(Fragment (&result)[COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  FLASHATTN_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("" : "+f"(result[i][0]), "+f"(result[i][1]), "+f"(result[i][2]), "+f"(result[i][3])::"memory");
  }
}

// Where an operand is: panels of 128-byte rows, as in SharedTile. next_panel: bytes from a panel to the next, for values,
// whose columns are not what is summed over.
typedef unsigned long long Descriptor;
FLASHATTN_FUNC Descriptor descriptor(uint address, uint next_panel) {
  constexpr Descriptor kSwizzle128 = 1ull << 62, kEightRows = Descriptor(1024 >> 4) << 32;
  return (address & 0x3ffff) >> 4 | Descriptor(next_panel >> 4) << 16 | kEightRows | kSwizzle128;
}

// One instruction: of 16 columns of a, and N columns of the result.
template <typename T, int N>
struct Product;

#define FLASHATTN_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define FLASHATTN_OUTPUTS_64 FLASHATTN_TEN() FLASHATTN_TEN(1) FLASHATTN_TEN(2) "%30, %31"
#define FLASHATTN_OUTPUTS_128                                                                          \
  FLASHATTN_TEN() FLASHATTN_TEN(1) FLASHATTN_TEN(2) FLASHATTN_TEN(3) FLASHATTN_TEN(4) FLASHATTN_TEN(5) \
  "%60, %61, %62, %63"
#define FLASHATTN_R1(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FLASHATTN_R4(i) FLASHATTN_R1(i), FLASHATTN_R1(i + 1), FLASHATTN_R1(i + 2), FLASHATTN_R1(i + 3)
#define FLASHATTN_REGISTERS_64 FLASHATTN_R4(0), FLASHATTN_R4(4)
#define FLASHATTN_REGISTERS_128 FLASHATTN_REGISTERS_64, FLASHATTN_R4(8), FLASHATTN_R4(12)

// X0 to X4: the operands behind the outputs. The last numbers of an instruction: no sign is changed, and whether the
// rows of an operand are what is summed over.
#define FLASHATTN_PRODUCT(T, TYPES, N, X0, X1, X2, X3, X4)                                                         \
  template <>                                                                                                      \
  struct Product<T, N> {                                                                                           \
    /* c = a b, or c += a b. a: rows; b: N rows. */                                                                \
    static FLASHATTN_FUNC void of_rows(Fragment* c, Descriptor a, Descriptor b, bool add) {                        \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " X2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N            \
                   "k16.f32." TYPES " {" FLASHATTN_OUTPUTS_##N "}, " X0 ", " X1 ", add, 1, 1, 0, 0; }"             \
                   : FLASHATTN_REGISTERS_##N                                                                       \
                   : "l"(a), "l"(b), "r"(int(add)));                                                               \
    }                                                                                                              \
    /* c += a b. b: 16 rows of N columns. */                                                                       \
    static FLASHATTN_FUNC void of_columns(Fragment* c, const uint (&a)[4], Descriptor b) {                         \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" FLASHATTN_OUTPUTS_##N "}, {" X0    \
                   ", " X1 ", " X2 ", " X3 "}, " X4 ", 1, 1, 1, 1;"                                                \
                   : FLASHATTN_REGISTERS_##N                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
    }                                                                                                              \
  };
#define FLASHATTN_PRODUCTS(T, TYPES)                                        \
  FLASHATTN_PRODUCT(T, TYPES, 64, "%32", "%33", "%34", "%35", "%36")        \
  FLASHATTN_PRODUCT(T, TYPES, 128, "%64", "%65", "%66", "%67", "%68")
FLASHATTN_PRODUCTS(bfloat, "bf16.bf16")
FLASHATTN_PRODUCTS(half, "f16.f16")

// Begins scores = the warpgroup's rows of `queries`, from first_row on, times all of `keys`.
template <typename T, int ROWS, int KEYS, int D>
FLASHATTN_FUNC void begin_multiply_keys(Fragment (&scores)[KEYS / 8], SharedTile<T, ROWS, D> queries, int first_row,
                                        SharedTile<T, KEYS, D> keys) {
  Descriptor a = descriptor(queries.memory + first_row * 128, 0), b = descriptor(keys.memory, 0);
  FLASHATTN_UNROLL
  for (int step = 0; step < (head_dim + 15) / 16; ++step) {
    int a_step = step / 4 * queries.kPanel + step % 4 * 32, b_step = step / 4 * keys.kPanel + step % 4 * 32;
    Product<T, KEYS>::of_rows(scores, a + (a_step >> 4), b + (b_step >> 4), step != 0);
  }
  commit_products();
}

// Probabilities as two 16-bit parts: the first operand of a product with values.
template <int KEYS>
struct TwoParts {
  uint large[KEYS / 16][4], small[KEYS / 16][4];

  template <typename T>
  FLASHATTN_FUNC void split(const Fragment (&probabilities)[KEYS / 8]) {
    FLASHATTN_UNROLL
    for (int i = 0; i < KEYS / 16; ++i) {
      FLASHATTN_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float* p = &probabilities[2 * i + e / 2][e % 2 * 2];
        split_pair<T>(p[0], p[1], large[i][e], small[i][e]);
      }
    }
  }
};

// Begins output += probabilities times `values`.
template <typename T, int KEYS, int DV>
FLASHATTN_FUNC void begin_add_values(Fragment (&output)[DV / 8], const TwoParts<KEYS>& probabilities,
                                     SharedTile<T, KEYS, DV> values) {
  constexpr int kColumns = DV % 128 == 0 ? 128 : 64;  // of an instruction
  Descriptor b = descriptor(values.memory, values.kPanel);
  FLASHATTN_UNROLL
  for (int i = 0; i < KEYS / 16; ++i) {
    FLASHATTN_UNROLL
    for (int column = 0; column < DV; column += kColumns) {
      Descriptor rows = b + ((i * 16 * 128 + column / 64 * values.kPanel) >> 4);
      Product<T, kColumns>::of_columns(&output[column / 8], probabilities.small[i], rows);
      Product<T, kColumns>::of_columns(&output[column / 8], probabilities.large[i], rows);
    }
  }
  commit_products();
}

}  // namespace flashattn
