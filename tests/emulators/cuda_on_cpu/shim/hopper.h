// PTX's instructions of compute capability 9.0, named as in instructions.h. setmaxnreg does nothing, because registers
// are not counted. The proxy fence does nothing, so the order between ordinary stores to shared memory and the reads by
// tensor cores is not checked.
#pragma once

#include "../runtime/hopper.h"
#include "instructions.h"

namespace ptx {

CUDA_FUNC void mbarrier_init_shared__cta_b64(uint address, int arrivals) {
  cuda_barrier_init(address, arrivals);
}
CUDA_FUNC void mbarrier_arrive_shared__cta_b64(uint address) {
  cuda_barrier_arrive(address, 0);
}
CUDA_FUNC void mbarrier_arrive_expect_tx_shared__cta_b64(uint address, int bytes) {
  cuda_barrier_arrive(address, bytes);
}
CUDA_FUNC void mbarrier_try_wait_parity_shared__cta_b64(uint address, int parity, CUDA_PLACE) {
  cuda_barrier_wait(address, parity, file, line);
}
CUDA_FUNC void fence_mbarrier_init_release_cluster() {}
CUDA_FUNC void fence_proxy_async_shared__cta() {}
CUDA_FUNC void setmaxnreg_inc_sync_aligned_u32(int) {}
CUDA_FUNC void setmaxnreg_dec_sync_aligned_u32(int) {}

CUDA_FUNC void cp_async_bulk_tensor_4d_shared__cluster_global_mbarrier__complete_tx__bytes(uint to, const void* map,
                                                                                           int column, int row,
                                                                                           int head, int batch,
                                                                                           uint barrier) {
  cuda_copy_box(to, static_cast<const CudaMap*>(map), column, row, head, batch, barrier);
}

CUDA_FUNC void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(uint to, const void* from, int bytes,
                                                                                 uint barrier) {
  cuda_copy_bytes(to, from, bytes, barrier);
}

CUDA_FUNC void wgmma_fence_sync_aligned() {}
CUDA_FUNC void wgmma_commit_group_sync_aligned() {
  cuda_commit_products();
}
CUDA_FUNC void wgmma_wait_group_sync_aligned(int under_way, CUDA_PLACE) {
  cuda_wait_for_products(under_way, file, line);
}

typedef unsigned long long Number;
CUDA_FUNC Number number_of(float& x) {
  return reinterpret_cast<Number>(&x);
}
CUDA_FUNC Number number_of(Number x) {
  return x;
}
// The operands, in this order: N / 2 sums; a (a descriptor or 4 registers); the descriptor of b; whether to add to the
// sums; the signs of a and b; whether a is transposed (only if a is a descriptor); whether b is transposed.
template <class T, int N, class... Operands>
CUDA_FUNC void begin_product(Operands&&... operands) {
  constexpr int kSums = N / 2, kRest = sizeof...(operands) - kSums;
  static_assert(kRest == 7 || kRest == 9, "a of rows, or in registers");
  const Number all[] = {number_of(operands)...};
  const Number* rest = all + kSums;
  CudaProduct product = {reinterpret_cast<float*>(all[0]), N, Packed<T>::element, false, kRest == 7, false, {}, 0, 0};
  if (all[kSums - 1] != all[0] + (kSums - 1) * sizeof(float)) cuda_fail("sums that do not lie side by side");
  if (kRest == 7) {
    product.a_descriptor = *rest++;
  } else {
    for (unsigned& a : product.a) a = static_cast<unsigned>(*rest++);
  }
  product.b_descriptor = *rest++;
  product.adds = *rest++;
  if (*rest++ != 1 || *rest++ != 1 || (kRest == 7 && *rest++ != 0)) cuda_fail("wgmma: a sign, or a transposed");
  product.b_is_transposed = *rest;
  cuda_begin_product(&product);
}
#define CUDA_WGMMA(name, T, N)                                                 \
  template <class... Operands>                                                 \
  CUDA_FUNC void wgmma_mma_async_sync_aligned_##name(Operands&&... operands) { \
    begin_product<T, N>(operands...);                                          \
  }
#define CUDA_WGMMAS(N)                              \
  CUDA_WGMMA(m64n##N##k16_f32_bf16_bf16, __bf16, N) \
  CUDA_WGMMA(m64n##N##k16_f32_f16_f16, _Float16, N)
CUDA_WGMMAS(16)
CUDA_WGMMAS(32)
CUDA_WGMMAS(48)
CUDA_WGMMAS(64)
CUDA_WGMMAS(80)
CUDA_WGMMAS(96)
CUDA_WGMMAS(112)
CUDA_WGMMAS(128)
#undef CUDA_WGMMAS
#undef CUDA_WGMMA

}  // namespace ptx
