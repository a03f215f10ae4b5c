// Copies an array byte by byte: one that begins in the middle of an element, as a view of bytes may.
#include "arguments.h"

using namespace flashattn;

// SIZE: bytes of an element. A thread has an element. Grid: (elements / 256) threadgroups.
template <int SIZE>
[[kernel, max_total_threads_per_threadgroup(256)]] void realign(FLASHATTN_VALUE(RealignParams, realign_params),
                                                                FLASHATTN_READ(uchar, misaligned),
                                                                FLASHATTN_WRITTEN(uchar, realigned),
                                                                uint thread_index [[thread_index_in_threadgroup]],
                                                                uint3 group [[threadgroup_position_in_grid]]) {
  int64_t element = int64_t(group.x) * 256 + thread_index;
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
