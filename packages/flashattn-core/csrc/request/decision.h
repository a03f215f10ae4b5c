// A decision says what the calls of one kind run. On a CPU a table makes it. On a GPU flashattn_core/decide.py makes it
// before the first of these calls is built, and each call looks it up.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"

namespace flashattn {

// What a primitive runs. Shapeless compilation may bring other lengths than those that it was built with.
struct Decision {
  Variant variant;
  Precision precision;  // that was asked for
  int query_len, key_len;
  bool by_name = false;
  Kernels failed = 0;                     // kernels that auto must not take for other lengths: they failed their check
  bool is_counted = true;                 // in stats()
  std::atomic<uint64_t>* left = nullptr;  // MLX's own attention is faster: who leaves the call to it counts here

  bool operator==(const Decision&) const = default;
};

// Seconds of one call of the kind.
struct Timing {
  double mlx, flash;
};

// What is known of a kind of call.
struct Settled {
  Variant variant;
  Kernels failed = 0;
  std::string wrong;           // why no kernel is left; empty: one is
  std::optional<Timing> left;  // MLX's own attention is faster
  std::string words;           // how status() names the kind
  std::atomic<uint64_t> left_calls = 0;
};

// What distinguishes kinds: all that kernels are compiled for, and sizes up to the next power of two.
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

// Null: nobody has settled it yet. Valid for ever.
Settled* find_settled(const CallKey& key);
void settle(const CallKey& key, std::unique_ptr<Settled> settled);

// Every kind whose calls were left to MLX's own attention, and how many since the start or the last reset.
struct LeftCalls {
  std::string words;
  Timing timing;
  uint64_t count;
};
std::vector<LeftCalls> left_calls();
void reset_left_calls();

// Throws NoKernelError where no kernel covers the call, or the checks have left none. Nothing: it is not settled yet.
std::optional<Decision> decided(const Arguments& arguments, Backend backend, mx::Device device);

// What the table alone says, whatever was checked or measured. Throws NoKernelError likewise.
Decision by_table(const Arguments& arguments, Backend backend);

// By the decision's lengths, or for other ones by the table. Throws NoKernelError likewise.
Variant variant_for(const Decision& decision, const Inputs& inputs, const Options& options, Backend backend);

// Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing the call: then a gradient may be wanted.
bool is_traced(const Arguments& arguments);

}  // namespace flashattn
