// The one table of kernels: what each can do, and which one a call takes. plan() prints its row; eval runs it.
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

// A kernel in one of its forms. usual_tiling() or times choose the tiling. A name has the tiling unless it is 0, and
// never the precision: "metal_prefill_tg@1".
struct Variant {
  Kernel kernel;
  int tiling = 0;
  Precision precision = Precision::float32;

  bool operator==(const Variant&) const = default;
};
std::string name(Variant variant);

struct Choice {
  std::optional<Variant> kernel;  // none: nothing covers the call
  std::string reason;             // in words, also for why nothing does
};

// No kernel covers the call; what() is the reason that plan() gives.
struct NoKernelError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Throws NoKernelError where there is none.
Variant chosen_variant(const Choice& choice);

// What the choice depends on.
struct CallShape {
  int query_len;
  int key_len;
  int head_dim;
  int value_dim;
  int bits;  // of quantised keys and values; 0: they are not
  int element_size;
  int compute_capability;  // of the GPU: 90 for 9.0; 0: not CUDA, or not known
  int multiprocessors = 0;
  int64_t heads = 0;     // of all batch elements
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

// `wanted` is "auto" or the name of the only kernel to consider; auto takes none of `failed`. Throws
// std::invalid_argument for a name that no forward kernel has.
Choice choose(Backend backend, CallShape shape, const std::string& wanted, Kernels failed = 0);

// The tiling that auto takes where nothing is timed.
int usual_tiling(Kernel kernel, CallShape shape);

// All that can run the call, which auto may take. The first one is choose()'s; the others follow in the order in which
// they replace each other where one fails its check.
struct Candidate {
  Variant variant;
  bool is_timed;  // nobody has measured where it is the fastest: this machine is to
};
std::vector<Candidate> candidates(Backend backend, CallShape shape);

// A backend's gradient has no choice: all of these kernels run. check_backward() throws NoKernelError for what they do
// not cover.
std::vector<Kernel> backward_kernels(Backend backend);
void check_backward(Backend backend, CallShape shape);
// With the precision that they have for the call.
Variant backward_variant(Backend backend, CallShape shape);

// The largest head_dim that some kernel of the backend takes; 0 where none does.
int max_head_dim(Backend backend, Pass pass, bool quantised);

// Queries up to this length take cpu_decode: few rows, the work is split over the keys.
constexpr int kMaxDecodeLen = 8;
// And up to this length cuda_decode.
constexpr int kMaxCudaDecodeLen = 16;

// Whether such a call with a mask that is an array has a block map. Decode steps have none: the CPU's read their few
// rows of the mask themselves, and a GPU's step is shorter than what the map saves of it.
constexpr bool has_block_map(Backend backend, int query_len, int key_len) {
  constexpr int kMostWithout = 256;
  return query_len > (backend == Backend::cuda ? kMaxCudaDecodeLen : kMaxDecodeLen) && key_len > kMostWithout;
}

}  // namespace flashattn
