// Instructions of compute capability 9.0: barriers, the tensor memory accelerator (TMA), and a warpgroup's products.
#pragma once

#include "cuda/arguments.h"
#include "ptx.h"

namespace flashattn {

// A barrier that opens whenever the expected number of arrivals, and of bytes, has come.
struct Barrier {
  uint address;

  FLASHATTN_FUNC void initialise(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  }
  FLASHATTN_FUNC void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  }
  FLASHATTN_FUNC void arrive_and_expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  }
  // Waits until it has opened `time` + 1 times.
  FLASHATTN_FUNC void wait(int time) const {
    asm volatile(
        "{ .reg .pred open; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1; @open bra DONE; bra AGAIN;"
        " DONE: }" ::"r"(address),
        "r"(time % 2)
        : "memory");
  }
};
constexpr int kBarrierBytes = 8;

// Call after all barriers are initialised, before any wait at one.
FLASHATTN_FUNC void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes what threads have written to shared memory visible to products. Call before the barrier between these.
FLASHATTN_FUNC void publish_operands() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Sets the registers per thread of this warpgroup. Taking more than the block has waits for ever.
template <int COUNT>
FLASHATTN_FUNC void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
FLASHATTN_FUNC void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Copies a box of an array, see tensor_map(), to shared memory, from this row and column on. The barrier counts bytes.
FLASHATTN_FUNC void copy_box(uint to, const cuda::TensorMap& map, int column, int row, int head, int batch,
                             Barrier arrived) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(arrived.address)
      : "memory");
}

// Copies bytes, a multiple of 16, to shared memory. The barrier counts them.
FLASHATTN_FUNC void copy_bytes(uint to, const void* from, int bytes, Barrier arrived) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(arrived.address)
               : "memory");
}

// Call before products: completes earlier writes to their registers.
FLASHATTN_FUNC void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
FLASHATTN_FUNC void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most N committed groups are under way. The compiler must not move uses of results above it.
template <int N, int COUNT>
FLASHATTN_FUNC void wait_for_products(Fragment (&result)[COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  FLASHATTN_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("" : "+f"(result[i][0]), "+f"(result[i][1]), "+f"(result[i][2]), "+f"(result[i][3])::"memory");
  }
}

// Describes an operand in shared memory: panels of 128-byte rows, as in SharedTile. next_panel: bytes from a panel to
// the next; only for values, whose rows are summed over.
typedef unsigned long long Descriptor;
FLASHATTN_FUNC Descriptor descriptor(uint address, uint next_panel) {
  constexpr Descriptor kSwizzle128 = 1ull << 62, kEightRows = Descriptor(1024 >> 4) << 32;
  return (address & 0x3ffff) >> 4 | Descriptor(next_panel >> 4) << 16 | kEightRows | kSwizzle128;
}

// One instruction: it sums over 16 columns of a, for N columns of the result.
template <typename T, int N>
struct Product;

#define FLASHATTN_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define FLASHATTN_OUTPUTS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHATTN_OUTPUTS_32 FLASHATTN_TEN() "%10, %11, %12, %13, %14, %15"
#define FLASHATTN_OUTPUTS_48 FLASHATTN_TEN() FLASHATTN_TEN(1) "%20, %21, %22, %23"
#define FLASHATTN_THIRTY FLASHATTN_TEN() FLASHATTN_TEN(1) FLASHATTN_TEN(2)
#define FLASHATTN_OUTPUTS_64 FLASHATTN_THIRTY "%30, %31"
#define FLASHATTN_OUTPUTS_80 FLASHATTN_THIRTY "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHATTN_OUTPUTS_96 FLASHATTN_THIRTY FLASHATTN_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHATTN_OUTPUTS_112 FLASHATTN_THIRTY FLASHATTN_TEN(3) FLASHATTN_TEN(4) "%50, %51, %52, %53, %54, %55"
#define FLASHATTN_OUTPUTS_128 FLASHATTN_THIRTY FLASHATTN_TEN(3) FLASHATTN_TEN(4) FLASHATTN_TEN(5) "%60, %61, %62, %63"
#define FLASHATTN_R1(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FLASHATTN_R2(i) FLASHATTN_R1(i), FLASHATTN_R1(i + 1)
#define FLASHATTN_R4(i) FLASHATTN_R2(i), FLASHATTN_R2(i + 2)
#define FLASHATTN_REGISTERS_16 FLASHATTN_R2(0)
#define FLASHATTN_REGISTERS_32 FLASHATTN_R4(0)
#define FLASHATTN_REGISTERS_48 FLASHATTN_R4(0), FLASHATTN_R2(4)
#define FLASHATTN_REGISTERS_64 FLASHATTN_R4(0), FLASHATTN_R4(4)
#define FLASHATTN_REGISTERS_80 FLASHATTN_REGISTERS_64, FLASHATTN_R2(8)
#define FLASHATTN_REGISTERS_96 FLASHATTN_REGISTERS_64, FLASHATTN_R4(8)
#define FLASHATTN_REGISTERS_112 FLASHATTN_REGISTERS_96, FLASHATTN_R2(12)
#define FLASHATTN_REGISTERS_128 FLASHATTN_REGISTERS_96, FLASHATTN_R4(12)

// X0 to X5: operands after the outputs. Last numbers in the instruction: two signs; whether rows are summed over.
#define FLASHATTN_PRODUCT(T, TYPES, N, X0, X1, X2, X3, X4, X5)                                            \
  template <>                                                                                             \
  struct Product<T, N> {                                                                                  \
    /* c = a b, or c += a b. a: rows; b: N rows. */                                                       \
    static FLASHATTN_FUNC void of_rows(Fragment* c, Descriptor a, Descriptor b, bool add) {               \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " X2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N   \
                   "k16.f32." TYPES " {" FLASHATTN_OUTPUTS_##N "}, " X0 ", " X1 ", add, 1, 1, 0, 0; }"    \
                   : FLASHATTN_REGISTERS_##N                                                              \
                   : "l"(a), "l"(b), "r"(int(add)));                                                      \
    }                                                                                                     \
    /* The same. b: 16 rows of N columns. */                                                              \
    static FLASHATTN_FUNC void of_columns(Fragment* c, const uint (&a)[4], Descriptor b, bool add) {      \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " X5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N   \
                   "k16.f32." TYPES " {" FLASHATTN_OUTPUTS_##N "}, {" X0 ", " X1 ", " X2 ", " X3 "}, " X4 \
                                                               ", add, 1, 1, 1; }"                        \
                   : FLASHATTN_REGISTERS_##N                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));                  \
    }                                                                                                     \
  };
#define FLASHATTN_PRODUCTS(T, TYPES)                                         \
  FLASHATTN_PRODUCT(T, TYPES, 16, "%8", "%9", "%10", "%11", "%12", "%13")    \
  FLASHATTN_PRODUCT(T, TYPES, 32, "%16", "%17", "%18", "%19", "%20", "%21")  \
  FLASHATTN_PRODUCT(T, TYPES, 48, "%24", "%25", "%26", "%27", "%28", "%29")  \
  FLASHATTN_PRODUCT(T, TYPES, 64, "%32", "%33", "%34", "%35", "%36", "%37")  \
  FLASHATTN_PRODUCT(T, TYPES, 80, "%40", "%41", "%42", "%43", "%44", "%45")  \
  FLASHATTN_PRODUCT(T, TYPES, 96, "%48", "%49", "%50", "%51", "%52", "%53")  \
  FLASHATTN_PRODUCT(T, TYPES, 112, "%56", "%57", "%58", "%59", "%60", "%61") \
  FLASHATTN_PRODUCT(T, TYPES, 128, "%64", "%65", "%66", "%67", "%68", "%69")
FLASHATTN_PRODUCTS(bfloat, "bf16.bf16")
FLASHATTN_PRODUCTS(half, "f16.f16")

}  // namespace flashattn
