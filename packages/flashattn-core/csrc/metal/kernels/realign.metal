// Copies an array byte by byte: one that begins in the middle of an element, as a view of bytes may.
#include "call/params.h"
#include "dialect.h"

using namespace flashattn;

// SIZE: bytes of an element. A thread has an element.
template <int SIZE>
[[kernel, max_total_threads_per_threadgroup(256)]] void realign(
    const device uchar* misaligned [[buffer(FLASHATTN_BUFFER_misaligned)]],
    device uchar* realigned [[buffer(FLASHATTN_BUFFER_realigned)]],
    const constant RealignParams& params [[buffer(FLASHATTN_BUFFER_realign_params)]],
    uint thread_index [[thread_index_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]]) {
  int64_t element = int64_t(group.x) * 256 + thread_index;
  if (element >= params.count) {
    return;
  }
  int64_t offset = 0, rest = element;
  for (int d = params.ndim - 1; d >= 0; --d) {
    offset += rest % params.shape[d] * params.strides[d];
    rest /= params.shape[d];
  }
  for (int i = 0; i < SIZE; ++i) {
    realigned[element * SIZE + i] = misaligned[offset * SIZE + i];
  }
}
