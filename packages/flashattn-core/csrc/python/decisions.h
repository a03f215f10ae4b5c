// The bindings through which flashattn_core/decide.py stores what kernel a kind of call runs. The module of
// tests/launches has them, too.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn {

void bind_decisions(nanobind::module_& m);

}  // namespace flashattn
