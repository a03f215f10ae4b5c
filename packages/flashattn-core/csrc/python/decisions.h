// The bindings with which flashattn_core/decide.py settles a kind of call. The module of tests/launches has them, too.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn {

void bind_decisions(nanobind::module_& m);

}  // namespace flashattn
