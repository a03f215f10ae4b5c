// From arrays to launches, for a GPU.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../call/limits.h"
#include "../gpu/work.h"
#include "gradient_inputs.h"

namespace flashattn {

gpu::Work forward_work(Variant variant, const Inputs& inputs, const Options& options, const Outputs& outputs);
gpu::Work backward_work(Variant variant, const Inputs& inputs, const Options& options, const GradientInputs& further,
                        const Gradients& gradients);

// Lengths of queries and of keys that a kernel is checked with: all ways in which tiles are full or ragged. A call of
// up to kFew queries is checked with as many as it has.
constexpr std::pair<int, int> kChecked[] = {{77, 330}, {192, 128}, {128, 45}, {77, 64}};
// Further lengths for cuda_prefill, at which its blocks share keys. The check draws one sequence with one key head.
constexpr std::pair<int, int> kCheckedSharing = {77, 2100};

// All instantiations that the kernel has for such calls, whatever their lengths and however their arrays lie; and their
// texts. A kernel of the gradient stands for all of its backend's.
std::vector<gpu::Launch> pipelines_of(Variant variant, const Inputs& inputs, const Options& options);
std::string source_text(const gpu::Launch& launch, Backend backend);

// Compiles what CUDA runs for the call if its arrays are contiguous. Throws NoKernelError where that fails: before the
// call is part of a graph there still is a choice.
void prepare_for_cuda(Variant variant, const Inputs& inputs, const Options& options, int device);

// Copies an array that begins in the middle of an element.
gpu::Work realign_work(Backend backend, const mx::array& misaligned, const mx::array& copy);

// Finds the block map of a mask, see block_map.h.
gpu::Work block_map_work(Backend backend, const mx::array& mask, const ArrayParams& params, const mx::array& map);

}  // namespace flashattn
