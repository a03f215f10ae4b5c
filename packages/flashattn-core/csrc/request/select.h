// Selects what may compute a call: choose() chooses a kernel, and on a GPU a check must pass before its programs are
// used.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "arguments.h"

namespace flashattn {

// What a primitive needs beside its call to choose its kernel again, also for lengths that shapeless compilation
// brings.
struct Selection {
  std::optional<Kernel> kernel;           // the kernel that the caller named; none: "auto"
  Kernels failed = 0;                     // kernels that failed their check, so "auto" does not take them
  bool is_counted = true;                 // whether stats() counts the call
  std::optional<bool> small_blocks = {};  // set by a check, which must run both sizes with short calls

  bool operator==(const Selection&) const = default;
};

// Throws NoKernelError if no kernel covers the call.
Variant variant_for(const Selection& selection, const Call& call, const Device& device);

// Compares a kernel's results with the CPU's. Returns what is wrong, or "" if nothing is.
using Check = std::function<std::string(Variant)>;

// Returns nothing if MLX's own attention should compute the call, which only happens if `may_leave`. Calls `check` for
// programs that no call has needed before. Throws NoKernelError if no kernel covers the call, or if none passes its
// check.
std::optional<Selection> select(const Arguments& arguments, const Call& call, const Device& device, bool may_leave,
                                const Check& check);

// The kernels that failed their check for this call in this process.
Kernels failed_before(const Call& call, const Device& device);

}  // namespace flashattn
