// Turns a call's arrays into launches of GPU kernels.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../call/limits.h"
#include "../gpu/work.h"
#include "../request/strides.h"

namespace flashattn {

gpu::Work forward_work(Variant variant, const Inputs& inputs, const Options& options, const Outputs& outputs);
gpu::Work backward_work(Variant variant, const Inputs& inputs, const Options& options, const GradientInputs& further,
                        const Gradients& gradients);

// A kernel is checked with these pairs of a number of queries and a number of keys. These lead to full and to partial
// tiles. A call of up to kFew queries is checked with its own number of queries.
constexpr std::pair<int, int> kChecked[] = {{77, 330}, {192, 128}, {300, 128}, {128, 45}, {77, 64}};
// cuda_prefill is also checked with these lengths, at which several blocks share the keys of the same rows. The check
// with these lengths has one sequence and one key/value head.
constexpr std::pair<int, int> kCheckedSharing = {77, 2100};

// Returns one launch for each instantiation of the kernel that calls like this one may need, whatever their lengths,
// strides and alignment are. A backward kernel stands for all backward kernels of its backend.
std::vector<gpu::Launch> pipelines_of(Variant variant, const Inputs& inputs, const Options& options);
std::string source_text(const gpu::Launch& launch, Backend backend);

// Compiles the CUDA kernels that the call runs if its arrays are contiguous. Throws NoKernelError if that fails. Must
// be called before the call becomes part of a graph, because only until then can the caller choose another kernel.
void prepare_for_cuda(Variant variant, const Inputs& inputs, const Options& options, int device);

// Makes the work that computes the block map of a mask, see call/block_map.h.
gpu::Work block_map_work(Backend backend, const mx::array& mask, const ArrayParams& params, const mx::array& map);

}  // namespace flashattn
