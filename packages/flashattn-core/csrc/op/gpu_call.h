// From arrays to launches, for a GPU.
#pragma once

#include <string>

#include "../gpu/work.h"
#include "gradient_inputs.h"

namespace flashattn {

gpu::Work forward_work(Kernel kernel, const Inputs& inputs, const Options& options, const Outputs& outputs);
gpu::Work backward_work(Backend backend, const Inputs& inputs, const Options& options, const GradientInputs& further,
                        const Gradients& gradients);

// All instantiations that the kernel has for such calls, whatever their lengths and however their arrays lie, by name;
// and the sums of their texts.
std::string pipelines_of(Kernel kernel, const Inputs& inputs, const Options& options, bool with_texts);

// Compiles what CUDA runs for the call if its arrays are contiguous. Throws NoKernelError where that fails: before the
// call is part of a graph there still is a choice.
void prepare_for_cuda(Kernel kernel, const Inputs& inputs, const Options& options, int device);

// Copies an array that begins in the middle of an element.
gpu::Work realign_work(Backend backend, const mx::array& misaligned, const mx::array& copy);

}  // namespace flashattn
