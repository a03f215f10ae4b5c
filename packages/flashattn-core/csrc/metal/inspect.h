// What a call would hand to Metal, as Python's own types and on any machine: tests run it where there is no GPU.
#pragma once

#include <nanobind/nanobind.h>

#include "../arguments.h"

namespace flashattn::metal {

// One dict for each launch; _ext.pyi has the keys. Throw as attention() does.
nanobind::list inspect_forward(const Arguments& arguments);

// `out` and `lse` are what attention() gave, the others what comes back for them; none for lse means zeros.
nanobind::list inspect_backward(const Arguments& arguments, const mx::array& out, const mx::array& lse,
                                const mx::array& out_gradient, const std::optional<mx::array>& lse_gradient);

}  // namespace flashattn::metal
