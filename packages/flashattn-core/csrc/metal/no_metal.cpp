// In encode.cpp's place where MLX has no Metal: nothing gets this far.
#include <stdexcept>

#include "encode.h"

namespace flashattn::metal {

void encode(const gpu::Work&, mx::Stream) {
  throw std::runtime_error("[flash_attention] this MLX has no Metal");
}

}  // namespace flashattn::metal
