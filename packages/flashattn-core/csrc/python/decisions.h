// Adds the functions that flashattn_core/decide.py needs to a Python module: to _ext, and to the module of
// tests/launches.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn {

void bind_decisions(nanobind::module_& m);

}  // namespace flashattn
