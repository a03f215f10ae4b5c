// Passes launches to the encoder of the stream's backend.
#include "gpu_stream.h"

#include "../cuda/encode.h"
#include "../metal/encode.h"
#include "../request/arguments.h"

namespace flashattn {

void run_on_gpu(const gpu::Work& work, const mx::Stream& stream) {
  backend_of(stream.device) == Backend::metal ? metal::encode(work, stream) : cuda::encode(work, stream);
}

}  // namespace flashattn
