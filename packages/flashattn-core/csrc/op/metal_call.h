// From arrays to launches, for Metal.
#pragma once

#include "../metal/encode.h"
#include "gradient_inputs.h"

namespace flashattn {

metal::Work metal_forward(Kernel kernel, const Inputs& inputs, const Options& options, const Outputs& outputs);
metal::Work metal_backward(const Inputs& inputs, const Options& options, const GradientInputs& further,
                           const Gradients& gradients);

// Copies an array that begins in the middle of an element.
metal::Work metal_realign(const mx::array& misaligned, const mx::array& copy);

}  // namespace flashattn
