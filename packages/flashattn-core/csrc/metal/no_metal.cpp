// In encode.cpp's place where MLX has no Metal: nothing gets this far.
#include <stdexcept>

#include "encode.h"

namespace flashattn::metal {

void encode(const Work&, mx::Stream) {
  throw std::runtime_error("FlashAttention has no GPU implementation.");
}

}  // namespace flashattn::metal
