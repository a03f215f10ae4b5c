// What a GPU's call settles while its graph is built, where there still is a choice.
#pragma once

#include <functional>
#include <string>

#include "arguments.h"

namespace flashattn {

// The name of the kernel that was the fastest for such calls on the device, beside the one that auto takes as a rule;
// empty where nothing was measured.
using Preference = std::function<std::string(const Arguments&, mx::Device, const std::string&)>;
void set_preference(Preference preference);
std::optional<Tiled> preferred(const Arguments& arguments, Backend backend, mx::Device device);

// The call's options, with what auto is to take, since it was measured, and what it must not, since it is wrong here:
// what it then takes has passed its check, and CUDA has compiled it. Throws NoKernelError where no kernel covers the
// call or is left, where the one that was asked for by name failed, and for what CUDA refuses. Of a call that is traced
// a gradient may be wanted: what the kernels for that get wrong is an error, too.
Options prepared(const Arguments& arguments, Backend backend, mx::Stream stream);

}  // namespace flashattn
