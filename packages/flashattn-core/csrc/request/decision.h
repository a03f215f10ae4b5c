// A decision says which kernel all calls of one kind run, see CallKey. On a CPU, the table of kernels makes it. On a
// GPU, flashattn_core/decide.py makes it before the first call of the kind is built, and later calls look it up.
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

// What a primitive runs. It was decided for query_len and key_len; shapeless compilation may change a call's lengths.
struct Decision {
  Variant variant;
  Precision precision;  // as requested
  int query_len, key_len;
  bool by_name = false;
  Kernels failed = 0;                     // kernels that failed their check: auto does not take them for other lengths
  bool is_counted = true;                 // whether stats() counts the call
  std::atomic<uint64_t>* left = nullptr;  // counts calls that MLX's own attention runs; null unless it is faster

  bool operator==(const Decision&) const = default;
};

// The stored decision for a kind of call, and what was measured for it.
struct Settled {
  Variant variant;
  Kernels failed = 0;
  std::string wrong;  // why no kernel can be used; empty: use `variant`
  // Seconds per call of MLX's own attention and of the variant; set if MLX's own attention is faster.
  std::optional<std::pair<double, double>> left;
  std::string words;  // how status() names the kind
  std::atomic<uint64_t> left_calls = 0;
};

// Calls with equal keys are of one kind. A key holds everything that kernels are compiled for, and sizes rounded up to
// powers of two.
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

// A kind of which MLX's own attention ran calls, because it is faster: (kind in words, MLX's seconds per call, the
// kernel's seconds per call, number of these calls since the start or the last reset).
using LeftCalls = std::tuple<std::string, double, double, uint64_t>;
std::vector<LeftCalls> left_calls();
void reset_left_calls();

// The stored decision for the call's kind, or on a CPU by_table(). Empty if no decision is stored yet. Throws
// NoKernelError if no kernel covers the call, or if none passed its check.
std::optional<Decision> decided(const Arguments& arguments, Backend backend, mx::Device device);

// The kernel table's choice, without regard to checks and timings. Throws NoKernelError if no kernel covers the call.
Decision by_table(const Arguments& arguments, Backend backend);

// The decision's variant if the call has the decision's lengths, else the kernel table's choice. Throws NoKernelError
// if no kernel covers the call.
Variant variant_for(const Decision& decision, const Inputs& inputs, const Options& options, Backend backend);

// Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing the call. Only then can anyone ask for its gradient.
bool is_traced(const Arguments& arguments);

}  // namespace flashattn
