// Chooses the kernel for a call: choose() is a pure function of the call and the device. On a GPU it also estimates
// whether MLX's own fused kernel is faster.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "call.h"

namespace flashattn {

#define FLASHATTN_KERNEL_ROW(name, ...) name,
enum class Kernel {
#include "kernels.def"
  count
};
#undef FLASHATTN_KERNEL_ROW
constexpr int kNumKernels = static_cast<int>(Kernel::count);

enum class Pass { forward, backward };

std::string_view name(Kernel kernel);
std::string_view name(Backend backend);
Backend backend_of(Kernel kernel);
Pass pass_of(Kernel kernel);
// Throws std::invalid_argument for a name that no backend has.
Backend backend_of(std::string_view name);
// The forward kernel of this name; none for "auto". Throws std::invalid_argument for another name.
std::optional<Kernel> kernel_named(std::string_view name);

// Thrown if no kernel covers the call. what() contains the reason that plan() gives.
struct NoKernelError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A set of kernels.
using Kernels = uint32_t;
constexpr Kernels with(Kernels kernels, Kernel kernel) {
  return kernels | 1u << static_cast<int>(kernel);
}
constexpr bool contains(Kernels kernels, Kernel kernel) {
  return with(kernels, kernel) == kernels;
}

// A kernel, and what it is compiled for besides the call.
struct Variant {
  Kernel kernel;
  Precision precision = Precision::float32;
  bool small_blocks = false;  // only cuda_prefill on compute capability 9.0 has both sizes, see has_small_blocks()

  bool operator==(const Variant&) const = default;
};

// How long a kernel takes for a call, relative to other estimates for this call.
struct Estimate {
  double pairs;             // the pairs of a query and a key that the kernel computes; padding is not known here
  double cost;              // of one pair, relative to MLX's own fused kernel
  std::string_view source;  // where the cost comes from

  double time() const { return pairs * cost; }
};

struct Choice {
  Variant variant;
  std::string_view why;              // why this kernel was chosen
  Estimate ours = {};                // of a GPU's kernel that the call does not name
  std::optional<Estimate> mlx = {};  // of MLX's own attention; none if it has no fused kernel for the call
  bool is_left = false;              // whether the patch leaves the call to MLX's own attention, which is faster
};

// Chooses a kernel that can run the call: `wanted`, or if there is none, the first of the table that is not in
// `failed`. Throws NoKernelError if there is no such kernel.
Choice choose(const Call& call, const Device& device, std::optional<Kernel> wanted = {}, Kernels failed = 0);

// Returns what a pair costs this kernel, see Estimate, and where the number comes from.
std::pair<double, std::string_view> cost_of(Kernel kernel, const Device& device);

// Returns the backend's backward kernels. A backward pass runs all of them. backward_variant() returns the first, and
// the precision in which all of them compute the call's gradient. It throws NoKernelError if one of them cannot run the
// call.
std::vector<Kernel> backward_kernels(Backend backend);
Variant backward_variant(const Call& call, const Device& device);

// The kernel whose cost is compared with MLX's, if `forward` computes the call: a traced call is compared with its
// gradient.
Kernel compared_kernel(const Call& call, Kernel forward);

// The largest head_dim that some kernel of the backend takes; 0 if there is no such kernel.
int max_head_dim(Backend backend, Pass pass, bool quantised);

// The costs that `mlxlm-flash tune` measured on one GPU. `source` names the GPU.
struct Costs {
  std::array<double, kNumKernels> cost = {};  // 0: not measured
  std::string source;
};
// Reads lines of the form of costs.def. Throws std::invalid_argument for a line of another form.
Costs read_costs(const std::string& text);

// The most queries that cpu_decode and Metal's decode kernels take.
constexpr int kMaxDecodeLen = 8;
// The most queries that cuda_decode takes.
constexpr int kMaxCudaDecodeLen = 16;

// A program may be compiled for exactly this number of queries, or for fewer. Above it, the number does not matter.
constexpr int max_exact_queries(Backend backend) {
  return backend == Backend::cuda ? kMaxCudaDecodeLen : kMaxDecodeLen;
}

// Whether a call with an array mask gets a block map. A call with few queries or few keys gets none, because the map
// would save too little. On the CPU, a decode step reads its few rows of the mask directly.
constexpr bool has_block_map(Backend backend, int query_len, int key_len) {
  constexpr int kMostWithout = 256;
  return query_len > max_exact_queries(backend) && key_len > kMostWithout;
}

}  // namespace flashattn
