// Functions for instructions of compute capability 9.0: barriers, the tensor memory accelerator (TMA), and products of
// a warpgroup.
#pragma once

#include "cuda/arguments.h"
#include "ptx.h"

namespace flashattn {

// An mbarrier in shared memory. It opens each time the expected number of threads has arrived and the expected number
// of bytes has been copied.
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
  // Waits until the barrier has opened `time` + 1 times.
  FLASHATTN_FUNC void wait(int time) const {
    asm volatile(
        "{ .reg .pred open; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1; @open bra DONE; bra AGAIN;"
        " DONE: }" ::"r"(address),
        "r"(time % 2)
        : "memory");
  }
};
constexpr int kBarrierBytes = 8;

// Makes initialised barriers visible to the TMA. Must be called before any thread waits at one of these barriers.
FLASHATTN_FUNC void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes what a thread has written to shared memory visible to wgmma. Must be called before the threads synchronise.
FLASHATTN_FUNC void publish_operands() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Both functions set how many registers each thread of this warpgroup has. take_registers() raises the number, and
// waits until the block has enough free registers. leave_registers() lowers the number.
template <int COUNT>
FLASHATTN_FUNC void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
FLASHATTN_FUNC void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Starts to copy a box of an array to shared memory, from this row and column on. The barrier counts the copied bytes.
FLASHATTN_FUNC void copy_box(uint to, const cuda::TensorMap& map, int column, int row, int head, int batch,
                             Barrier arrived) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(arrived.address)
      : "memory");
}

// Starts to copy `bytes` bytes to shared memory. `bytes` must be a multiple of 16. The barrier counts the copied bytes.
FLASHATTN_FUNC void copy_bytes(uint to, const void* from, int bytes, Barrier arrived) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(arrived.address)
               : "memory");
}

// Must be called before products. Makes the products wait for earlier writes to the registers that they use.
FLASHATTN_FUNC void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
FLASHATTN_FUNC void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most N committed groups of products are unfinished. The empty asm statements keep the compiler from
// moving uses of `result` above the wait.
template <int N, int COUNT>
FLASHATTN_FUNC void wait_for_products(Fragment (&result)[COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  FLASHATTN_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("" : "+f"(result[i][0]), "+f"(result[i][1]), "+f"(result[i][2]), "+f"(result[i][3])::"memory");
  }
}

// Describes an operand in shared memory, in SharedTile's layout. next_panel: bytes from one panel to the next. Only a
// product that sums over the operand's rows (values) uses next_panel.
typedef unsigned long long Descriptor;
FLASHATTN_FUNC Descriptor descriptor(uint address, uint next_panel) {
  constexpr Descriptor kSwizzle128 = 1ull << 62, kEightRows = Descriptor(1024 >> 4) << 32;
  return (address & 0x3ffff) >> 4 | Descriptor(next_panel >> 4) << 16 | kEightRows | kSwizzle128;
}

// A product that one wgmma instruction computes. It sums over 16 columns of `a`, and the result has N columns.
template <typename T, int N>
struct Product;

#define FLASHATTN_OUTPUTS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHATTN_OUTPUTS_32 FLASHATTN_OUTPUTS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHATTN_OUTPUTS_48 FLASHATTN_OUTPUTS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHATTN_OUTPUTS_64 FLASHATTN_OUTPUTS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHATTN_OUTPUTS_80 FLASHATTN_OUTPUTS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHATTN_OUTPUTS_96 FLASHATTN_OUTPUTS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHATTN_OUTPUTS_112 FLASHATTN_OUTPUTS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHATTN_OUTPUTS_128 FLASHATTN_OUTPUTS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHATTN_R(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FLASHATTN_REGISTERS_16 FLASHATTN_R(0), FLASHATTN_R(1)
#define FLASHATTN_REGISTERS_32 FLASHATTN_REGISTERS_16, FLASHATTN_R(2), FLASHATTN_R(3)
#define FLASHATTN_REGISTERS_48 FLASHATTN_REGISTERS_32, FLASHATTN_R(4), FLASHATTN_R(5)
#define FLASHATTN_REGISTERS_64 FLASHATTN_REGISTERS_48, FLASHATTN_R(6), FLASHATTN_R(7)
#define FLASHATTN_REGISTERS_80 FLASHATTN_REGISTERS_64, FLASHATTN_R(8), FLASHATTN_R(9)
#define FLASHATTN_REGISTERS_96 FLASHATTN_REGISTERS_80, FLASHATTN_R(10), FLASHATTN_R(11)
#define FLASHATTN_REGISTERS_112 FLASHATTN_REGISTERS_96, FLASHATTN_R(12), FLASHATTN_R(13)
#define FLASHATTN_REGISTERS_128 FLASHATTN_REGISTERS_112, FLASHATTN_R(14), FLASHATTN_R(15)

// X0 to X5: the numbers of the asm statement's operands after the outputs. The instruction ends with constants: "1, 1"
// keeps the signs of both matrices. After "1, 1", each matrix in shared memory has one constant. It is 1 if the product
// sums over the matrix's rows, and 0 if it sums over its columns.
#define FLASHATTN_PRODUCT(T, TYPES, N, X0, X1, X2, X3, X4, X5)                                            \
  template <>                                                                                             \
  struct Product<T, N> {                                                                                  \
    /* c = a b^T, or c += a b^T. a and b are in shared memory; b has N rows. */                           \
    static FLASHATTN_FUNC void of_rows(Fragment* c, Descriptor a, Descriptor b, bool add) {               \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " X2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N   \
                   "k16.f32." TYPES " {" FLASHATTN_OUTPUTS_##N "}, " X0 ", " X1 ", add, 1, 1, 0, 0; }"    \
                   : FLASHATTN_REGISTERS_##N                                                              \
                   : "l"(a), "l"(b), "r"(int(add)));                                                      \
    }                                                                                                     \
    /* c = a b, or c += a b. a is in registers; b has 16 rows of N columns. */                            \
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
