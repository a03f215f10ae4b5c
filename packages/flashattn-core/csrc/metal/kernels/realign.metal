// Copies an array that begins in the middle of an element, see realign.h. Each thread copies one element.
#include "realign.h"

#include "arguments.h"

using namespace flashattn;

// Grid: (elements / 256) threadgroups of 256 threads.
template <int SIZE>
[[kernel, max_total_threads_per_threadgroup(256)]] void realign(FLASHATTN_VALUE(ArrayParams, array_params),
                                                                FLASHATTN_READ(uchar, misaligned),
                                                                FLASHATTN_WRITTEN(uchar, realigned),
                                                                uint thread_index [[thread_index_in_threadgroup]],
                                                                uint3 group [[threadgroup_position_in_grid]]) {
  realign_body<SIZE>(array_params, misaligned, realigned, int64_t(group.x) * 256 + thread_index);
}
