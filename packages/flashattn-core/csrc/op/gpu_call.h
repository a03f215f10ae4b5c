// From arrays to launches, for a GPU.
#pragma once

#include "../gpu/work.h"
#include "gradient_inputs.h"

namespace flashattn {

gpu::Work forward_work(Kernel kernel, const Inputs& inputs, const Options& options, const Outputs& outputs);
gpu::Work backward_work(Backend backend, const Inputs& inputs, const Options& options, const GradientInputs& further,
                        const Gradients& gradients);

// Copies an array that begins in the middle of an element.
gpu::Work realign_work(Backend backend, const mx::array& misaligned, const mx::array& copy);

}  // namespace flashattn
