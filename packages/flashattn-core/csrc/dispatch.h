// The one table that chooses a kernel. plan() prints its row; eval runs it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace flashattn {

enum class Kernel { cpu_prefill, cpu_decode };
constexpr int kNumKernels = 2;

enum class Backend { cpu, metal };

std::string_view name(Kernel kernel);

struct Choice {
  std::optional<Kernel> kernel;  // none: nothing covers the call
  std::string reason;            // in words, also for why nothing does
};

// `wanted` is "auto" or the name of the only kernel to consider. Throws std::invalid_argument for a name
// that no kernel has.
Choice choose(Backend backend, int query_len, const std::string& wanted);

}  // namespace flashattn
