// Chooses the kernel for a call, from a table of the calls that each kernel can run. Both plan() and evaluation use it.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "precision.h"

namespace flashattn {

enum class Kernel {
  cpu_prefill,
  cpu_decode,
  cpu_backward,
  metal_rowwise,
  metal_decode_fast,
  metal_decode_parallel,
  metal_decode_split,
  metal_prefill_tg,
  metal_prefill_reg,
  metal_backward_dq,
  metal_backward_dkv,
  cuda_prefill,
  cuda_decode,
  cuda_rowwise,
  cuda_backward_dq,
  cuda_backward_dkv,
  count
};
constexpr int kNumKernels = static_cast<int>(Kernel::count);

enum class Backend { cpu, metal, cuda };
enum class Pass { forward, backward };

std::string_view name(Kernel kernel);
std::string_view name(Backend backend);
Backend backend_of(Kernel kernel);
Pass pass_of(Kernel kernel);
// Throws std::invalid_argument for a name that no backend has.
Backend backend_of(std::string_view name);

// A kernel with a tiling and a precision. Timings choose the tiling of a timed kernel, and usual_tiling() that of other
// kernels. name() is the kernel's name, followed by "@" and the tiling if it is not 0, as in "metal_prefill_tg@1".
struct Variant {
  Kernel kernel;
  int tiling = 0;
  Precision precision = Precision::float32;

  bool operator==(const Variant&) const = default;
};
std::string name(Variant variant);

struct Choice {
  std::optional<Variant> kernel;  // empty if no kernel covers the call
  std::string reason;             // why this kernel was chosen, or why none was
};

// Thrown if no kernel covers the call. what() contains the reason that plan() gives.
struct NoKernelError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Returns the choice's kernel. Throws NoKernelError if there is none.
Variant chosen_variant(const Choice& choice);

// The choice of a kernel depends on these facts and on the backend.
struct CallShape {
  int query_len;
  int key_len;
  int head_dim;
  int value_dim;
  int bits;                // per element of quantised keys and values; 0 if they are not quantised
  int element_size;        // of query, in bytes
  int compute_capability;  // of the GPU: 90 means 9.0; 0 if it is unknown or the backend is not CUDA
  int multiprocessors = 0;
  int64_t heads = 0;     // query heads of all batch elements
  int64_t pairs = 0;     // (query, visible key) pairs in one head, see visible_pairs()
  bool is_even = false;  // see sees_evenly()
  Precision precision = Precision::float32;
};

// A set of kernels.
using Kernels = uint32_t;
constexpr Kernels with(Kernels kernels, Kernel kernel) {
  return kernels | 1u << static_cast<int>(kernel);
}
constexpr bool contains(Kernels kernels, Kernel kernel) {
  return with(kernels, kernel) == kernels;
}

// Chooses the kernel named `wanted`. If `wanted` is "auto", chooses from the kernels that are not in `failed`. Throws
// std::invalid_argument if no forward kernel is named `wanted`.
Choice choose(Backend backend, CallShape shape, const std::string& wanted, Kernels failed = 0);

// The tiling that "auto" takes for a kernel that is not timed.
int usual_tiling(Kernel kernel, CallShape shape);

// A variant that can run a call. candidates() returns the variant of choose() first, then the others that can run the
// call. Timings may change this order. The first variant that passes its check is used.
struct Candidate {
  Variant variant;
  bool is_timed;  // whether each machine times the variant, because the table only estimates which calls it suits
};
std::vector<Candidate> candidates(Backend backend, CallShape shape);

// Returns the backend's backward kernels. A backward pass runs all of them. check_backward() throws NoKernelError if
// one of them cannot run the call.
std::vector<Kernel> backward_kernels(Backend backend);
void check_backward(Backend backend, CallShape shape);
// Returns the first of backward_kernels(), and the precision in which all of them compute the call's gradient.
Variant backward_variant(Backend backend, CallShape shape);

// The largest head_dim that some kernel of the backend takes; 0 if there is no such kernel.
int max_head_dim(Backend backend, Pass pass, bool quantised);

// The most queries that cpu_decode takes.
constexpr int kMaxDecodeLen = 8;
// The most queries that cuda_decode takes.
constexpr int kMaxCudaDecodeLen = 16;

// Whether a call with an array mask gets a block map. A call with few queries or few keys gets none, because the map
// would save too little. On the CPU, a decode step reads its few rows of the mask directly.
constexpr bool has_block_map(Backend backend, int query_len, int key_len) {
  constexpr int kMostWithout = 256;
  return query_len > (backend == Backend::cuda ? kMaxCudaDecodeLen : kMaxDecodeLen) && key_len > kMostWithout;
}

}  // namespace flashattn
