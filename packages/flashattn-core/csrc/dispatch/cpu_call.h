// Turns a call's arrays into arguments of the CPU's kernels, which run on MLX's CPU stream.
#pragma once

#include <algorithm>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../cpu/backward.h"
#include "../request/strides.h"
#include "mlx/backend/cpu/encoder.h"

namespace flashattn {

cpu::AttentionArgs forward_args(const Call& call, const Inputs& inputs, const Outputs& outputs);
cpu::BackwardArgs backward_args(Kernel forward_kernel, const Call& call, const Inputs& inputs,
                                const GradientInputs& further, const Gradients& gradients);

// Tells the stream's encoder which arrays its next job reads and writes, and returns the encoder.
mx::cpu::CommandEncoder& cpu_encoder(const mx::Stream& stream, const Arrays& inputs, Arrays& outputs);

// Returns a function that runs `job`. If the job fails, the function fills the outputs, which must be contiguous, with
// NaN, because MLX may use them even then.
template <typename Job>
auto whole_or_nan(const Arrays& outputs, Job job) {
  std::vector<std::span<uint8_t>> written;
  for (const mx::array& output : outputs) {
    written.emplace_back(const_cast<uint8_t*>(output.data<uint8_t>()), output.nbytes());
  }
  return [job = std::move(job), written = std::move(written)] {
    constexpr uint8_t kNan = 0xff;  // a number that consists of these bytes is NaN in all of our dtypes
    try {
      job();
    } catch (const std::exception& error) {
      for (std::span<uint8_t> bytes : written) std::fill(bytes.begin(), bytes.end(), kNan);
      if (!dynamic_cast<const std::bad_alloc*>(&error)) throw;
      throw std::runtime_error("[flash_attention] no memory for the kernel's working arrays");
    }
  };
}

}  // namespace flashattn
