// Replaces encode.cpp where MLX has no Metal; no call gets this far.
#include <stdexcept>

#include "encode.h"

namespace flashattn::metal {

void encode(const gpu::Work&, mx::Stream) {
  throw std::runtime_error("[flash_attention] this MLX has no Metal");
}

}  // namespace flashattn::metal
