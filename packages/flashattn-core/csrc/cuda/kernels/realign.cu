// Copies an array byte by byte: one that begins in the middle of an element, as a view of bytes may.
#include "kernel.h"

using namespace flashattn;

// SIZE: bytes of an element. A thread has an element.
template <int SIZE>
FLASHATTN_KERNEL realign(const cuda::Arguments& arguments) {
  FLASHATTN_VALUE(RealignParams, realign_params);
  FLASHATTN_READ(uchar, misaligned);
  FLASHATTN_WRITTEN(uchar, realigned);
  int64_t element = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (element >= realign_params.count) {
    return;
  }
  int64_t offset = 0, rest = element;
  for (int d = realign_params.ndim - 1; d >= 0; --d) {
    offset += rest % realign_params.shape[d] * realign_params.strides[d];
    rest /= realign_params.shape[d];
  }
  for (int i = 0; i < SIZE; ++i) {
    realigned[element * SIZE + i] = misaligned[offset * SIZE + i];
  }
}
