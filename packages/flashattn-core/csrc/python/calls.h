// Bindings of the plain structs that describe a call and its kernel, and of what Python's check of kernels needs.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "../call/choose.h"
#include "mlx/stream.h"

namespace flashattn {

void bind_calls(nanobind::module_& m);

// Asks flashattn_core.check what is wrong with a kernel's programs for such calls; "" if nothing is.
std::string wrong_with(const Call& call, Variant variant, const mlx::core::Stream& stream);

}  // namespace flashattn
