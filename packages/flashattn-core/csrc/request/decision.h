// A decision says which kernel all calls of one kind run. On a CPU it comes from the table of kernels. On a GPU
// flashattn_core/decide.py makes it before the first call of the kind is built, and later calls look it up.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"

namespace flashattn {

// What a primitive runs. It was built for query_len and key_len; shapeless compilation may change them.
struct Decision {
  Variant variant;
  Precision precision;  // as requested
  int query_len, key_len;
  bool by_name = false;
  Kernels failed = 0;                     // kernels that auto must not take for other lengths: they failed their check
  bool is_counted = true;                 // in stats()
  std::atomic<uint64_t>* left = nullptr;  // counts calls left to MLX's own attention; null unless it is faster

  bool operator==(const Decision&) const = default;
};

// Seconds that one call of a kind takes, with MLX's own attention and with ours.
struct Timing {
  double mlx, flash;
};

// What has been found out about a kind of call.
struct Settled {
  Variant variant;
  Kernels failed = 0;
  std::string wrong;           // why no kernel can be used; empty: use `variant`
  std::optional<Timing> left;  // set if MLX's own attention is faster
  std::string words;           // how status() names the kind
  std::atomic<uint64_t> left_calls = 0;
};

// The key of a kind of call: everything that kernels are compiled for, and sizes rounded up to a power of two.
class CallKey {
 public:
  CallKey(const Inputs& inputs, const Arguments& arguments, mx::Device device);

  bool operator==(const CallKey&) const = default;
  size_t hash() const;

 private:
  void add(int number) { numbers_[count_++] = number; }

  std::array<int32_t, 40> numbers_ = {};
  int count_ = 0;
};

// Null if the kind has not been settled. The pointer stays valid forever.
Settled* find_settled(const CallKey& key);
void settle(const CallKey& key, std::unique_ptr<Settled> settled);

// Every kind whose calls were left to MLX's own attention, and how many calls since the start or the last reset.
struct LeftCalls {
  std::string words;
  Timing timing;
  uint64_t count;
};
std::vector<LeftCalls> left_calls();
void reset_left_calls();

// Empty if the call's kind is not settled. Throws NoKernelError if no kernel covers the call or passed its check.
std::optional<Decision> decided(const Arguments& arguments, Backend backend, mx::Device device);

// The kernel table's choice, whatever checks and timings found. Throws NoKernelError if no kernel covers the call.
Decision by_table(const Arguments& arguments, Backend backend);

// The decision's variant if the call has its lengths, else the kernel table's choice. Throws NoKernelError if none.
Variant variant_for(const Decision& decision, const Inputs& inputs, const Options& options, Backend backend);

// Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing the call: then a gradient may be wanted.
bool is_traced(const Arguments& arguments);

}  // namespace flashattn
