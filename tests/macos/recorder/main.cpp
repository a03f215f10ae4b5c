// recorder KERNEL QUERY_LEN KEY_LEN REPEATS LIMIT BITS
// Encodes a float16 call REPEATS times. It has 4 heads, 2 key/value heads, head_dim 64 and sinks. Its keys, values and
// dout are the second halves of longer arrays. KERNEL "backward" encodes the gradient. LIMIT is the largest number of
// threads in a threadgroup. BITS is the number of bits of quantised keys, or 0 if keys are not quantised. The program
// prints the description of the launches, then the calls that the encoder gets.
#include "dispatch/gpu_call.h"
#include "gpu/encode.h"
#include "metal/launch.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace mx = mlx::core;
using namespace flashattn;

namespace {

Kernel kernel_called(const std::string& wanted) {
  for (int i = 0; i < kNumKernels; ++i) {
    if (name(static_cast<Kernel>(i)) == wanted) {
      return static_cast<Kernel>(i);
    }
  }
  throw std::invalid_argument("no kernel is called " + wanted);
}

mx::array allocated(mx::Shape shape, mx::Dtype dtype) {
  mx::array a(std::move(shape), dtype, nullptr, {});
  a.set_data(mx::allocator::malloc(a.nbytes()));
  return a;
}

// An array that begins in the middle of its buffer.
mx::array second_half(const mx::Shape& shape, mx::Dtype dtype = mx::float16) {
  mx::Shape longer = shape, start(4, 0);
  start[2] = shape[2];
  longer[2] = 2 * shape[2];
  mx::array half = mx::slice(mx::zeros(longer, dtype), start, longer);
  mx::eval(half);
  return half;
}

gpu::Work work_of(const std::string& kernel, int query_len, int key_len, int bits) {
  mx::Shape rows = {1, 4, query_len, 64}, keys = {1, 2, key_len, 64}, numbers = {1, 4, query_len};
  Arguments call;
  const auto set = [&](Input input, mx::array array) { call.inputs[index(input)] = std::move(array); };
  mx::array key = second_half(keys);
  set(Input::query, allocated(rows, mx::float16));
  set(Input::sinks, allocated({4}, mx::float32));
  if (bits > 0) {
    call.options.bits = bits;
    call.options.group_size = 64;
    key = second_half({1, 2, key_len, 64 * bits / 32}, mx::uint32);
    for (Input input : {Input::key_scales, Input::key_biases, Input::value_scales, Input::value_biases}) {
      set(input, second_half({1, 2, key_len, 1}));
    }
  }
  set(Input::key, key);
  set(Input::value, key);
  mx::array out = allocated(rows, mx::float16), lse = allocated(numbers, mx::float32);
  mx::array row_stats = allocated({1, 4, query_len, 2}, mx::float32), exact_out = allocated(rows, mx::float32);
  Device metal = {.backend = Backend::metal};
  if (kernel != "backward") {
    return forward_work({kernel_called(kernel)}, describe(call), metal, Inputs(call),
                        {out, &lse, &row_stats, bits == 0 ? &exact_out : nullptr});
  }
  mx::array dout = second_half(rows), dlse = allocated(numbers, mx::float32), delta = allocated(numbers, mx::float32);
  mx::array dq = allocated(rows, mx::float16), dk = allocated(keys, mx::float16), dv = allocated(keys, mx::float16);
  return backward_work({Kernel::metal_backward_dq}, describe(call), metal, Inputs(call),
                       {{exact_out, &lse, &row_stats, &exact_out}, dout, dlse}, {dq, dk, dv, delta});
}

std::string text_of(const gpu::Size& size) {
  return std::to_string(size[0]) + " " + std::to_string(size[1]) + " " + std::to_string(size[2]);
}

void describe(const gpu::Launches& launches) {
  const char* roles[] = {"input", "output", "bytes"};
  for (const gpu::Launch& launch : launches.launches) {
    std::cout << "launch " << launch.function << "\n";
    for (auto [binding, role] : launch.arguments) {
      std::cout << "takes " << roles[static_cast<int>(role)] << " " << metal::buffer_of(binding) << " "
                << gpu::name(binding) << "\n";
    }
    for (const gpu::Constant& constant : launch.constants) {
      std::visit([&](auto value) { std::cout << "value " << value << "\n"; }, constant.value);
    }
    std::cout << "on " << text_of(launch.grid) << " of " << text_of(launch.threadgroup) << "\n";
  }
}

}  // namespace

int main(int, char** argv) {
  int repeats = std::stoi(argv[4]);
  MTL::ComputePipelineState::limit = std::stoi(argv[5]);
  gpu::Work work = work_of(argv[1], std::stoi(argv[2]), std::stoi(argv[3]), std::stoi(argv[6]));
  describe(*work.launches);
  try {
    for (int i = 0; i < repeats; ++i) {
      metal::encode(work, mx::Stream(0, mx::Device::gpu));
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
