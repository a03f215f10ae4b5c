// Turns a call's arrays into launches of GPU kernels, and queues them on MLX's GPU stream.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "../gpu/encode.h"
#include "../request/strides.h"

namespace flashattn {

// `call` describes the inputs; these functions add the strides.
gpu::Work forward_work(Variant variant, const Call& call, const Device& device, const Inputs& inputs,
                       const Outputs& outputs);
gpu::Work backward_work(Variant variant, const Call& call, const Device& device, const Inputs& inputs,
                        const GradientInputs& further, const Gradients& gradients);

// A kernel is checked with these numbers of {queries, keys}, which lead to full and to partial tiles. If a call has at
// most max_exact_queries(), its kernel is checked with the call's own number of queries instead.
constexpr std::pair<int, int> kChecked[] = {{77, 330}, {192, 128}, {300, 128}, {128, 45}, {77, 64}};
// cuda_prefill is also checked with these numbers of {queries, keys}, with one sequence and one key/value head. In this
// check, several blocks split the keys of the same queries.
constexpr std::pair<int, int> kCheckedSharing = {77, 2100};

// Returns a launch for each program that the kernel may need, for any lengths, strides and alignment. If the kernel is
// a backward kernel, returns the launches of all backward kernels of its backend.
std::vector<gpu::Launch> programs_of(Variant variant, const Call& call, const Device& device);
// The same for the call's own lengths and contiguous arrays.
std::vector<gpu::Launch> usual_programs_of(Variant variant, const Call& call, const Device& device);
std::string source_text(const gpu::Launch& launch, Backend backend);

// Makes the work that computes the block map of a mask, see call/block_map.h.
gpu::Work block_map_work(Backend backend, const mx::array& mask, const ArrayParams& params, const mx::array& map);

// Makes the work that appends rows to a quantised cache, see op/append.h. inputs, outputs: those of the primitive.
gpu::Work append_work(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs,
                      const std::array<bool, 6>& in_place, int offset, int group_size, int bits);

// Queues the work. Its launches must be for the stream's backend.
inline void run_on_gpu(const gpu::Work& work, const mx::Stream& stream) {
  backend_of(stream.device) == Backend::metal ? metal::encode(work, stream) : cuda::encode(work, stream);
}

}  // namespace flashattn
