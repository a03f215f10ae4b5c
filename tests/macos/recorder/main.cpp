// Encodes one call of half precision: recorder KERNEL QUERY_LEN KEY_LEN REPEATS LIMIT. 4 heads, 2 key/value heads,
// head_dim 64; keys are the second half of a longer array, and there are sinks. LIMIT is how many threads a threadgroup
// may have.
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

}  // namespace

int main(int, char** argv) {
  int query_len = std::stoi(argv[2]), key_len = std::stoi(argv[3]), repeats = std::stoi(argv[4]);
  MTL::ComputePipelineState::limit = std::stoi(argv[5]);

  mx::array query = mx::zeros({1, 4, query_len, 64}, mx::float16), sinks = mx::zeros({4});
  mx::array longer = mx::zeros({1, 2, 2 * key_len, 64}, mx::float16);
  mx::array key = mx::slice(longer, {0, 0, key_len, 0}, {1, 2, 2 * key_len, 64});
  mx::eval(query, key, sinks);

  metal::Call call = {.params = {}, .dtype = metal::Dtype::float16, .bias_dtype = metal::Dtype::float32};
  call.params.batch_dims = call.params.batch_shape[0] = 1;
  call.params.batch_size = 1;
  call.params.num_heads = 4;
  call.params.num_kv_heads = 2;
  call.params.query_len = query_len;
  call.params.key_len = key_len;
  call.params.head_dim = call.params.value_dim = 64;
  call.present[metal::kSinks] = true;

  metal::Work work;
  work.params = call.params;
  work.launches = metal::launches(kernel_called(argv[1]), call);
  work.arrays[metal::kQuery] = query;
  work.arrays[metal::kKey] = work.arrays[metal::kValue] = key;
  work.arrays[metal::kSinks] = sinks;
  work.arrays[metal::kOut] = allocated({1, 4, query_len, 64}, mx::float16);
  work.arrays[metal::kLse] = allocated({1, 4, query_len}, mx::float32);
  try {
    for (int i = 0; i < repeats; ++i) {
      metal::encode(work, mx::Stream(0, mx::Device::gpu));
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
