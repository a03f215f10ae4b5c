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

// The numbers of queries and keys with which a kernel is checked. They make full and partial tiles of queries and keys.
// A call of up to kFew queries is checked with its own number of queries.
constexpr std::pair<int, int> kChecked[] = {{77, 330}, {192, 128}, {300, 128}, {128, 45}, {77, 64}};
// Further lengths for cuda_prefill, at which blocks share keys. The check with these lengths has one sequence and one
// key/value head.
constexpr std::pair<int, int> kCheckedSharing = {77, 2100};

// One launch for each instantiation of the kernel that calls like this one may need, at any lengths, strides and
// alignment. A backward kernel stands for all backward kernels of its backend.
std::vector<gpu::Launch> pipelines_of(Variant variant, const Inputs& inputs, const Options& options);
std::string source_text(const gpu::Launch& launch, Backend backend);

// Compiles the CUDA kernels that the call runs if its arrays are contiguous. Throws NoKernelError if that fails. The
// caller does this before the call becomes part of a graph, when it can still choose another kernel.
void prepare_for_cuda(Variant variant, const Inputs& inputs, const Options& options, int device);

// Finds the block map of a mask, see block_map.h.
gpu::Work block_map_work(Backend backend, const mx::array& mask, const ArrayParams& params, const mx::array& map);

}  // namespace flashattn
