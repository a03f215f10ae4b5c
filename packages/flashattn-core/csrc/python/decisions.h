// Adds functions to a Python module, which is _ext or the module of tests/launches. flashattn_core/decide.py calls
// these functions.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn {

void bind_decisions(nanobind::module_& m);

}  // namespace flashattn
