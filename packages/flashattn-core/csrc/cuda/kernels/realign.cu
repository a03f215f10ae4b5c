// See realign.h: a thread has an element.
#include "realign.h"

#include "kernel.h"

using namespace flashattn;

template <int SIZE>
FLASHATTN_KERNEL realign(const cuda::Arguments& arguments) {
  FLASHATTN_VALUE(RealignParams, realign_params);
  FLASHATTN_READ(uchar, misaligned);
  FLASHATTN_WRITTEN(uchar, realigned);
  realign_body<SIZE>(realign_params, misaligned, realigned, int64_t(blockIdx.x) * blockDim.x + threadIdx.x);
}
