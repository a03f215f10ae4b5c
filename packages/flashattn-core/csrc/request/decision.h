// The choice of a kernel for all calls with the same CallKey. On a CPU, the table of kernels chooses. On a GPU,
// flashattn_core/decide.py chooses at the first call, and stores the choice for later calls.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"

namespace flashattn {

// The kernel that was chosen for these sizes. Shapeless compilation may give the primitive other sizes.
struct Decision {
  Variant variant;
  Precision precision;  // as requested
  int query_len, key_len, head_dim, value_dim;
  bool by_name = false;
  // Kernels that failed their check. "auto" does not take them for other sizes either, see variant_for().
  Kernels failed = 0;
  bool is_counted = true;                 // whether stats() counts the call
  std::atomic<uint64_t>* left = nullptr;  // number of calls that MLX's own attention ran; null if MLX's is not faster

  bool operator==(const Decision&) const = default;
};

// The stored decision for all calls with the same CallKey.
struct Settled {
  Variant variant;
  Kernels failed = 0;
  std::string wrong;  // why no kernel can be used; empty if `variant` can be used
  // Seconds per call of MLX's own attention and of `variant`. Set only if MLX's own attention is faster.
  std::optional<std::pair<double, double>> left;
  std::string words;  // describes the calls with this CallKey in status()
  std::atomic<uint64_t> left_calls = 0;
};

// Calls with equal keys run the same kernel. A key holds the properties that kernels are compiled for, and the other
// sizes rounded up to powers of two.
class CallKey {
 public:
  CallKey(const Inputs& inputs, const Arguments& arguments, mx::Device device);

  bool operator<(const CallKey& other) const {
    return std::tie(count_, numbers_) < std::tie(other.count_, other.numbers_);
  }

 private:
  void add(int number) { numbers_[count_++] = number; }

  std::array<int32_t, 40> numbers_ = {};
  int count_ = 0;
};

void settle(const CallKey& key, std::unique_ptr<Settled> settled);

// For each CallKey of which MLX's own attention ran calls, because it is faster: (the calls' description, MLX's seconds
// per call, the kernel's seconds per call, the number of these calls since the start or the last reset).
using LeftCalls = std::tuple<std::string, double, double, uint64_t>;
std::vector<LeftCalls> left_calls();
void reset_left_calls();

// On a GPU, returns the stored decision, or nothing if there is none yet. On a CPU, and for an empty query, returns
// by_table(). Throws NoKernelError if no kernel covers the call, or if none passed its check.
std::optional<Decision> decided(const Arguments& arguments, Backend backend, mx::Device device);

// Returns the kernel table's choice, which ignores checks and timings. Throws NoKernelError if no kernel covers the
// call.
Decision by_table(const Arguments& arguments, Backend backend);

// Returns the decision's variant if the inputs still have the decision's sizes. Otherwise returns the kernel table's
// choice. Throws NoKernelError if no kernel covers the call.
Variant variant_for(const Decision& decision, const Inputs& inputs, const Options& options, Backend backend);

// Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing the call. Only then can anyone ask for its gradient.
bool is_traced(const Arguments& arguments);

}  // namespace flashattn
