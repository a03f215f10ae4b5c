// Passes launches to the encoder of the stream's backend.
#include "gpu_stream.h"

#include <stdexcept>

#include "../cuda/encode.h"
#include "../metal/encode.h"
#include "../request/arguments.h"

namespace flashattn {

void run_on_gpu(const gpu::Work& work, const mx::Stream& stream) {
  switch (Backend backend = backend_of(stream.device)) {
    case Backend::metal: return metal::encode(work, stream);
    case Backend::cuda: return cuda::encode(work, stream);
    default: throw std::logic_error("nothing runs on " + std::string(name(backend)));
  }
}

}  // namespace flashattn
