// Copies an array that begins in the middle of an element, see realign.h. Each thread copies an element.
#include "realign.h"

#include "kernel.h"

using namespace flashattn;

template <int SIZE>
FLASHATTN_KERNEL realign(const cuda::Arguments& arguments) {
  FLASHATTN_VALUE(ArrayParams, array_params);
  FLASHATTN_READ(uchar, misaligned);
  FLASHATTN_WRITTEN(uchar, realigned);
  realign_body<SIZE>(array_params, misaligned, realigned, int64_t(blockIdx.x) * blockDim.x + threadIdx.x);
}
