// Bindings of the plain structs that describe a call and its kernel, and of what Python's check of kernels needs.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn {

void bind_calls(nanobind::module_& m);

}  // namespace flashattn
