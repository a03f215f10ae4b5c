// Which kernels of a GPU have shown on this machine that they compute what the CPU's do.
#pragma once

#include <functional>
#include <string>

#include "arguments.h"

namespace flashattn {

// Runs a kernel on small inputs of the call's kind. Returns what is wrong with it, or nothing.
using Check = std::function<std::string(const Arguments&, Kernel, mx::Stream)>;
void set_check(Check check);

// Makes sure that a GPU's call can run, while there still is a choice: what it takes has passed its check, and CUDA has
// compiled it. Returns the kernels that failed theirs, which auto must not take. FLASHATTN_CHECK says whether there is
// a check, and whether what passed is kept on disk. Throws NoKernelError where no kernel is left, where the one that
// was asked for by name failed, and for what CUDA refuses.
Kernels prepare(const Arguments& arguments, Backend backend, mx::Stream stream);

}  // namespace flashattn
