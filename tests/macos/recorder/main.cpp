// Encodes one call of half precision: recorder KERNEL QUERY_LEN KEY_LEN REPEATS LIMIT BITS. KERNEL "backward": its
// gradient. 4 heads, 2 key/value heads, head_dim 64; keys are the second half of a longer array, and dout the last rows
// of one; there are sinks. LIMIT is how many threads a threadgroup may have; BITS: of quantised keys, 0 if they are
// not.
#include "metal/encode.h"
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

// Begins in the middle of its buffer.
mx::array second_half(const mx::Shape& shape, mx::Dtype dtype = mx::float16) {
  mx::Shape longer = shape, start(4, 0);
  start[2] = shape[2];
  longer[2] = 2 * shape[2];
  mx::array half = mx::slice(mx::zeros(longer, dtype), start, longer);
  mx::eval(half);
  return half;
}

struct Arranged {
  gpu::Call call;
  metal::Work work;

  void set(gpu::Binding binding, mx::array array) {
    call.present[gpu::index(binding)] = true;
    work.arrays[gpu::index(binding)] = std::move(array);
  }
};

gpu::Call call_of(int query_len, int key_len) {
  gpu::Call call = {.params = {}, .dtype = Dtype::float16};
  call.params.batch_dims = call.params.batch_shape[0] = 1;
  call.params.batch_size = 1;
  call.params.num_heads = 4;
  call.params.num_kv_heads = 2;
  call.params.query_len = query_len;
  call.params.key_len = key_len;
  call.params.head_dim = call.params.value_dim = 64;
  return call;
}

metal::Work work_of(const std::string& kernel, int query_len, int key_len, int bits) {
  using gpu::Binding;
  mx::Shape rows = {1, 4, query_len, 64}, keys = {1, 2, key_len, 64}, numbers = {1, 4, query_len};
  Arranged all = {call_of(query_len, key_len), {}};
  all.set(Binding::query, allocated(rows, mx::float16));
  mx::array halves = second_half(keys);
  if (bits > 0) {
    all.call.params.bits = bits;
    all.call.params.group_size = 64;
    all.call.group_dtype = Dtype::float16;
    keys.back() = 64 * bits / 32;
    halves = second_half(keys, mx::uint32);
    keys.back() = 1;
    for (Binding binding : {Binding::key_scales, Binding::key_biases, Binding::value_scales, Binding::value_biases}) {
      all.set(binding, second_half(keys));
    }
  }
  all.set(Binding::key, halves);
  all.set(Binding::value, halves);
  all.set(Binding::sinks, allocated({4}, mx::float32));
  all.set(Binding::out, allocated(rows, mx::float16));
  all.set(Binding::lse, allocated(numbers, mx::float32));
  all.set(Binding::row_stats, allocated({1, 4, query_len, 2}, mx::float32));
  if (kernel != "backward") {
    all.work.launches = metal::launches(kernel_called(kernel), all.call);
    return all.work;
  }
  all.set(Binding::dout, second_half(rows));
  all.set(Binding::dlse, allocated(numbers, mx::float32));
  all.set(Binding::delta, allocated(numbers, mx::float32));
  all.set(Binding::dq, allocated(rows, mx::float16));
  all.set(Binding::dk, allocated(keys, mx::float16));
  all.set(Binding::dv, allocated(keys, mx::float16));
  all.work.launches = metal::backward_launches(all.call, {});
  return all.work;
}

}  // namespace

int main(int, char** argv) {
  int repeats = std::stoi(argv[4]);
  MTL::ComputePipelineState::limit = std::stoi(argv[5]);
  metal::Work work = work_of(argv[1], std::stoi(argv[2]), std::stoi(argv[3]), std::stoi(argv[6]));
  try {
    for (int i = 0; i < repeats; ++i) {
      metal::encode(work, mx::Stream(0, mx::Device::gpu));
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
