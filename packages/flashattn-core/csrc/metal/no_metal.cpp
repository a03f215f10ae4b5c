// Replaces encode.cpp if MLX is built without Metal. Calls for a GPU then fail earlier, so nothing calls encode().
#include <stdexcept>

#include "../gpu/encode.h"

namespace flashattn::metal {

void encode(const gpu::Work&, mx::Stream) {
  throw std::runtime_error("[flash_attention] this MLX has no Metal");
}

}  // namespace flashattn::metal
