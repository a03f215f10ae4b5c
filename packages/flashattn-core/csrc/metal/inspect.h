// A call's Metal work as Python's own types, for tests: what they need to run it without a GPU.
#pragma once

#include <nanobind/nanobind.h>

#include "encode.h"

namespace flashattn::metal {

// One dict for each launch; _ext.pyi has the keys. Inputs must be evaluated.
nanobind::list inspect(const Work& work);

}  // namespace flashattn::metal
