// Turns a call's arrays into arguments of the CPU's kernels, which run on MLX's CPU stream.
#pragma once

#include "../cpu/backward.h"
#include "../request/strides.h"
#include "mlx/backend/cpu/encoder.h"

namespace flashattn {

cpu::AttentionArgs forward_args(const Call& call, const Inputs& inputs, const Outputs& outputs);
cpu::BackwardArgs backward_args(Kernel forward_kernel, const Call& call, const Inputs& inputs,
                                const GradientInputs& further, const Gradients& gradients);

// Tells the stream's encoder which arrays its next job reads and writes, and returns the encoder.
mx::cpu::CommandEncoder& cpu_encoder(const mx::Stream& stream, const std::vector<mx::array>& inputs,
                                     std::vector<mx::array>& outputs);

}  // namespace flashattn
