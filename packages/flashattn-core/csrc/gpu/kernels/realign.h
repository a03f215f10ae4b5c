// Copies one element byte by byte, since the array may begin in the middle of an element, as a view of bytes can.
#pragma once

#include "call/params.h"
#include "dialect.h"

namespace flashattn {

// SIZE: bytes per element.
template <int SIZE>
FLASHATTN_FUNC void realign_body(FLASHATTN_UNIFORM ArrayParams& params, const FLASHATTN_DEVICE uchar* misaligned,
                                 FLASHATTN_DEVICE uchar* realigned, int64_t element) {
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

}  // namespace flashattn
