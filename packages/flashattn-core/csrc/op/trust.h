// Which kernels of a GPU have shown on this machine that they compute what the CPU's do.
#pragma once

#include <functional>
#include <string>

#include "arguments.h"

namespace flashattn {

// Runs a kernel on small inputs of the call's kind. Returns what is wrong with it, or nothing.
using Check = std::function<std::string(const Arguments&, Tiled, mx::Stream)>;
void set_check(Check check);

// What is wrong with the kernel for such calls; empty if nothing is, or if nothing is to be checked: FLASHATTN_CHECK
// says that, and whether what passed is kept on disk. A verdict holds for the whole process.
std::string wrong_with(Tiled kernel, const Arguments& arguments, const Inputs& inputs, mx::Stream stream);

// Whether this thread is checking a kernel: the calls of a check are not checked, and take what they are told to.
bool is_checking();

}  // namespace flashattn
