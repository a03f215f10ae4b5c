// What flashattn_core/decide.py asks C++ when it settles a kind of call. Also part of the tests' own module.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn {

void bind_decisions(nanobind::module_& m);

}  // namespace flashattn
