// Allocates arrays, and copies inputs whose first byte is not aligned to their element size.
#include "memory.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstring>
#include <stdexcept>
#include <string>

#include "../gpu/encode.h"
#include "../request/arguments.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace flashattn {
namespace {

// From MLX 0.32.4 on, malloc() returns an object that owns a buffer. Earlier releases return the buffer itself.
template <typename Memory>
const void* pointer_of(const Memory& memory) {
  if constexpr (requires { memory.buffer(); }) {
    return memory.buffer().ptr();
  } else {
    return memory.ptr();
  }
}

void allocate(mx::array& output, const mx::Stream& stream) {
  if (backend_of(stream.device) == Backend::cuda) {
    return cuda::allocate(output, stream);
  }
  auto data = mx::allocator::malloc(output.nbytes());
  if (output.nbytes() > 0 && !pointer_of(data)) {  // MLX does not check this itself
    throw std::runtime_error("[flash_attention] no memory for an array of " + std::to_string(output.nbytes()) +
                             " bytes");
  }
  output.set_data(std::move(data));
}

bool is_aligned(const mx::array& input) {
  // An empty array counts as aligned, because kernels read nothing of it.
  return input.size() == 0 || reinterpret_cast<uintptr_t>(input.data<void>()) % input.itemsize() == 0;
}

// Copies each element with memcpy, which needs no alignment. The copy is the stream's next job.
mx::array aligned_copy(const mx::array& input, const mx::Stream& stream) {
  mx::array copy(input.shape(), input.dtype(), nullptr, {});
  allocate(copy, stream);
  auto& encoder = mx::cpu::get_command_encoder(stream);
  encoder.dispatch([from = input.data<char>(), to = copy.data<char>(), shape = input.shape(), strides = input.strides(),
                    count = static_cast<int64_t>(input.size()), size = static_cast<int64_t>(input.itemsize())] {
    for (int64_t i = 0; i < count; ++i) {
      int64_t offset = 0, rest = i;
      for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) offset += rest % shape[d] * strides[d];
      std::memcpy(to + i * size, from + offset * size, size);
    }
  });
  encoder.add_temporary(copy);
  return copy;
}

}  // namespace

void allocate(std::vector<mx::array>& outputs, const mx::Stream& stream) {
  for (mx::array& output : outputs) {
    allocate(output, stream);
  }
}

// Speeds up the first writes to an output. MLX's CPU allocator gets new memory from the system for each large array.
// With pages of 4 KB, the first writes to this memory take 2 % of the time of a long prefill.
void prefer_huge_pages([[maybe_unused]] std::vector<mx::array>& arrays) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  for (mx::array& array : arrays) {
    uintptr_t data = reinterpret_cast<uintptr_t>(array.data<void>());
    uintptr_t begin = (data + kHugePage - 1) / kHugePage * kHugePage;
    uintptr_t end = (data + array.nbytes()) / kHugePage * kHugePage;
    if (begin < end) {
      madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // the system may ignore this advice
    }
  }
#endif
}

std::vector<mx::array> aligned_on_cpu(std::vector<mx::array> inputs, const mx::Stream& stream) {
  for (mx::array& input : inputs) {
    if (!is_aligned(input)) input = aligned_copy(input, stream);
  }
  return inputs;
}

}  // namespace flashattn
