// The one table that chooses a kernel. plan() prints its row; eval runs it.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

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
};
constexpr int kNumKernels = 11;

enum class Backend { cpu, metal };

std::string_view name(Kernel kernel);

struct Choice {
  std::optional<Kernel> kernel;  // none: nothing covers the call
  std::string reason;            // in words, also for why nothing does
};

// No kernel covers the call; what() is the reason that plan() gives.
struct NoKernelError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Throws NoKernelError where there is none.
Kernel kernel_of(const Choice& choice);

// What the choice depends on.
struct CallShape {
  int query_len;
  int key_len;
  int head_dim;
  int value_dim;
  bool quantised;  // keys and values
};

// `wanted` is "auto" or the name of the only kernel to consider. Throws std::invalid_argument for a name
// that no kernel has.
Choice choose(Backend backend, CallShape shape, const std::string& wanted);

// The gradient's kernels are not in the table: there is no choice. Throws NoKernelError for shapes that they do not
// cover.
void check_backward(Backend backend, CallShape shape);

}  // namespace flashattn
