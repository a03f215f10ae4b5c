// From arrays to launches, for Metal.
#pragma once

#include "../metal/encode.h"
#include "gradient_inputs.h"

namespace flashattn {

metal::Work metal_forward(Kernel kernel, const Inputs& inputs, const Options& options, const Outputs& outputs);
metal::Work metal_backward(const Inputs& inputs, const Options& options, const GradientInputs& further,
                           const Gradients& gradients);

// The inputs, with copies, which the stream makes before its next launch, of those that begin in the middle of an
// element.
std::vector<mx::array> metal_aligned(const std::vector<mx::array>& inputs, const mx::Stream& stream);
// The launch that makes one.
metal::Work metal_realign(const mx::array& misaligned, const mx::array& copy);

}  // namespace flashattn
