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

// A kernel is checked with these numbers of {queries, keys}, which lead to full and to partial tiles. If a call has at
// most kFew queries, its kernel is checked with the call's own number of queries instead.
constexpr std::pair<int, int> kChecked[] = {{77, 330}, {192, 128}, {300, 128}, {128, 45}, {77, 64}};
// cuda_prefill is also checked with these numbers of {queries, keys}, with one sequence and one key/value head. In this
// check, several blocks split the keys of the same queries.
constexpr std::pair<int, int> kCheckedSharing = {77, 2100};

// Returns a launch for each instantiation that the kernel may need, for any lengths, strides and alignment. If the
// kernel is a backward kernel, returns the launches of all backward kernels of its backend. has_exact_out: whether the
// call saves exact_out, see Outputs.
std::vector<gpu::Launch> pipelines_of(Variant variant, const Inputs& inputs, const Options& options,
                                      bool has_exact_out);
std::string source_text(const gpu::Launch& launch, Backend backend);

// Compiles the CUDA kernels of the call, for contiguous arrays. Throws NoKernelError if compilation fails. Call this
// before the call becomes part of a graph, because afterwards no other kernel can be chosen.
void prepare_for_cuda(Variant variant, const Inputs& inputs, const Options& options, bool has_exact_out, int device);

// Makes the work that computes the block map of a mask, see call/block_map.h.
gpu::Work block_map_work(Backend backend, const mx::array& mask, const ArrayParams& params, const mx::array& map);

}  // namespace flashattn
