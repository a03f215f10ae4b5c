// Adds launches to MLX's CUDA graphs, as kernel nodes.
#include "../gpu/encode.h"

#include <algorithm>
#include <bit>
#include <map>
#include <tuple>
#include <utility>

#include "../gpu/split.h"
#include "arguments.h"
#include "driver.h"
#include "mlx/allocator.h"
#include "mlx/backend/cuda/cuda.h"
#include "mlx/primitives.h"
#include "mlx_cuda.h"

namespace flashattn::cuda {
namespace {

using namespace gpu;

// The scratch arrays that the calling thread keeps for later calls. The number in the key is that of a copy: kept()
// makes several copies of a small array.
thread_local std::map<std::tuple<mx::Stream, Binding, uint32_t>, mx::array> kept_scratch;

// Returns scratch for one call. Two calls that use the same scratch never overlap, because each counts as a writer of
// it. So a small array has kCopies copies, which successive calls use in turn. A call can then start before the
// previous call has ended.
const mx::array& kept(const Scratch& wanted, mx::Stream stream, uint32_t call) {
  constexpr int64_t kRow = 1024;
  constexpr int kCopies = 4;
  constexpr int64_t kSmall = 1 << 20;
  bool is_small =
      wanted.elements <= kSmall && (wanted.binding == Binding::partials || wanted.binding == Binding::arrivals);
  std::tuple key(stream, wanted.binding, is_small ? call % kCopies : 0);
  auto found = kept_scratch.find(key);
  if (found != kept_scratch.end() && static_cast<int64_t>(found->second.size()) >= wanted.elements) {
    return found->second;
  }
  mx::Shape shape = {static_cast<int>(std::bit_ceil(static_cast<uint64_t>(divide_up(wanted.elements, kRow)))), kRow};
  // The array has a primitive, because MLX reads the stream from it. Each call expects the counters in `arrivals` to be
  // 0, and leaves them at 0. The CPU writes the first zeros, because a CUDA graph with a memset node may fail.
  mx::array made(shape, mx::float32, std::make_shared<mx::Exp>(stream), {});
  if (wanted.binding == Binding::arrivals) {
    made.set_data(mx::allocator::malloc(made.nbytes()));
    std::fill_n(made.data<float>(), made.size(), 0.0f);
  } else {
    allocate(made, stream);
  }
  return kept_scratch.insert_or_assign(key, made).first->second;
}

// The array's address on the GPU. It does not use array::data(), which would move the array to memory shared with the
// CPU.
void* address(const mx::array& array) {
  return static_cast<char*>(static_cast<const mx::cu::CudaBuffer*>(array.buffer().ptr())->data) + array.offset();
}

// Describes an array of 16-bit floats to the TMA, which copies it in the layout of SharedTile. The elements of a row
// must be contiguous. The array may be scratch.
TensorMap tensor_map(const MappedArray& mapped, const mx::array& array, bool is_float16) {
  // Values of the driver's enums, such as CUtensorMapDataType. kZeros: elements outside the array are read as 0.
  constexpr int kFloat16 = 6, kBfloat16 = 9, kNotInterleaved = 0, kSwizzle128 = 3, kIntoL2By256 = 3, kZeros = 0;
  const auto& [columns, rows, heads, batches] = mapped.sizes;
  const auto size = [](int64_t count) { return static_cast<uint64_t>(count); };
  const uint64_t sizes[] = {size(columns), size(rows), size(heads), size(batches)};
  // Strides in bytes. An axis of one element has stride 0, which the driver refuses, so it gets 16.
  const auto step = [](int64_t stride) { return stride != 0 ? static_cast<uint64_t>(2 * stride) : 16; };
  const uint64_t steps[] = {step(mapped.steps[0]), step(mapped.steps[1]), step(mapped.steps[2])};
  const uint32_t box[] = {64, static_cast<uint32_t>(mapped.box_rows), 1, 1}, every[] = {1, 1, 1, 1};
  TensorMap map;
  FLASHATTN_CALL(cuTensorMapEncodeTiled, &map, is_float16 ? kFloat16 : kBfloat16, std::size(sizes), address(array),
                 sizes, steps, box, every, kNotInterleaved, kSwizzle128, kIntoL2By256, kZeros);
  return map;
}

}  // namespace

void allocate(mx::array& output, mx::Stream stream) {
  // Exp is the only op that libmlx exports and that allocates its output on the GPU. For an input that has no elements
  // and is not contiguous, it launches no kernel.
  static const auto& inputs = *new std::vector<mx::array>{[] {  // never destroyed: MLX may be gone at exit
    mx::array none({0}, mx::float32, nullptr, {});
    none.copy_shared_buffer(mx::array(0.0f), {0}, {}, 1);
    return none;
  }()};
  mx::Exp(stream).eval_gpu(inputs, output);
}

void release_scratch() {
  kept_scratch.clear();
}

void encode(const Work& work, mx::Stream stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const Launches& launches = *work.launches;
  std::array<std::optional<mx::array>, kNumBindings> scratch;
  std::vector<mx::array> alive = work.temporaries;  // kept until the GPU is done
  thread_local uint32_t calls = 0;
  uint32_t call = launches.scratch.empty() ? 0 : calls++;
  for (const Scratch& wanted : launches.scratch) {
    alive.push_back(scratch[index(wanted.binding)].emplace(kept(wanted, stream, call)));
  }
  if (!alive.empty()) {  // must come before the nodes, which stay in the graph even if a later launch throws
    encoder.add_completed_handler([alive = std::move(alive)] {});
  }
  std::optional<mx::cu::CommandEncoder::ConcurrentContext> concurrent;
  for (const Launch& launch : launches.launches) {
    if (launch.with_next && !concurrent) concurrent.emplace(encoder);
    // Everything that may throw comes before set_input_array(). If code after set_input_array() threw, MLX's next node
    // would get the dependencies of this node.
    CUfunction function = function_of(launch, stream.device.index);
    BackwardArguments arguments = {{{{}, launches.split, launches.params, launches.array}, {}, {}, {}, {}},
                                   launches.backward};
    const auto array_of = [&](Binding binding) -> const std::optional<mx::array>& {
      return (scratch[index(binding)] ? scratch : work.arrays)[index(binding)];
    };
    TensorMap* map = &arguments.key_map;
    bool is_float16 = array_of(Binding::query) && array_of(Binding::query)->dtype() == mx::float16;
    for (const MappedArray& mapped : launch.tensor_maps) {
      *map++ = tensor_map(mapped, *array_of(mapped.array), is_float16);
    }
    for (auto [binding, role] : launch.arguments) {
      const std::optional<mx::array>& array = array_of(binding);
      if (role == Role::value || !array) continue;
      role == Role::input ? encoder.set_input_array(*array) : encoder.set_output_array(*array);
      arguments.arrays[index(binding)] = address(*array);
    }
    void* parameters[] = {&arguments};  // for a kernel that takes a base struct, CUDA copies only the base
    encoder.add_kernel_node_raw(function, {launch.grid[0], launch.grid[1], launch.grid[2]},
                                {launch.threadgroup[0], launch.threadgroup[1], launch.threadgroup[2]}, {},
                                launch.dynamic_shared, parameters);
    if (!launch.with_next) concurrent.reset();
  }
}

}  // namespace flashattn::cuda
