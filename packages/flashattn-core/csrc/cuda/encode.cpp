// Launches as nodes of MLX's graphs.
#include "encode.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
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

// All of them are one number. Of MLX's ops that allocate memory and fill it Exp alone is exported: it makes zeros of
// it.
mx::array minus_infinities(mx::ShapeElem size) {
  static const auto& one = *new mx::array(-std::numeric_limits<float>::infinity());  // never destroyed: MLX may be gone
  mx::array many({size}, mx::float32, nullptr, {});
  many.copy_shared_buffer(one, {0}, {.contiguous = false, .row_contiguous = false, .col_contiguous = false}, 1);
  return many;
}

// As many as this or more.
mx::array zeros(int64_t count, mx::Stream stream) {
  if (count > std::numeric_limits<mx::ShapeElem>::max() / 2) {
    throw std::runtime_error("[flash_attention] the call needs " + std::to_string(count) +
                             " numbers of partial results");
  }
  auto size = static_cast<mx::ShapeElem>(std::bit_ceil(static_cast<uint64_t>(count)));
  auto exp = std::make_shared<mx::Exp>(stream);
  mx::array made({size}, mx::float32, exp, {});
  exp->eval_gpu({minus_infinities(size)}, made);
  return made;
}

// Counters, which are 0 between calls, and behind them what is another thing to each call.
struct Kept {
  mx::array array;
  int64_t counters;
};

// What a thread, which alone uses its streams, keeps for their next calls.
thread_local std::map<mx::Stream, Kept> kept_scratch;

// Calls that have the same run one behind the other, since all of them write it.
const Kept& kept(const std::vector<Scratch>& scratch, mx::Stream stream) {
  int64_t counters = 0, others = 0;
  for (const Scratch& wanted : scratch) {
    (wanted.binding == Binding::arrivals ? counters : others) += wanted.elements;
  }
  auto found = kept_scratch.find(stream);
  if (found == kept_scratch.end() || found->second.counters < counters ||
      static_cast<int64_t>(found->second.array.size()) < found->second.counters + others) {
    counters = 4 * divide_up(std::max<int64_t>(counters, 1024), 4);  // what follows is read as 16 bytes
    found = kept_scratch.insert_or_assign(stream, Kept{zeros(counters + others, stream), counters}).first;
  }
  return found->second;
}

// Where kernels find the array. array::data() would move it to memory that the CPU shares.
void* address(const mx::array& array) {
  return static_cast<char*>(static_cast<const mx::cu::CudaBuffer*>(array.buffer().ptr())->data) + array.offset();
}

// Boxes of 64 columns of so many rows, which come as SharedTile has them. The array's columns lie side by side.
TensorMap tensor_map(const mx::array& array, const Strides& strides, int rows_of_box) {
  // Of CUtensorMapDataType and so on. What is outside of the array is zero.
  constexpr int kFloat16 = 6, kBfloat16 = 9, kNotInterleaved = 0, kSwizzle128 = 3, kIntoL2By256 = 3, kZeros = 0;
  const auto size = [&](int axis) { return static_cast<uint64_t>(array.shape(axis)); };
  const uint64_t sizes[] = {size(-1), size(-2), size(-3), array.ndim() == 4 ? size(0) : 1};
  // In bytes, never 0: the stride of an axis of one element is.
  const auto step = [](int64_t stride) { return stride != 0 ? static_cast<uint64_t>(2 * stride) : 16; };
  const uint64_t steps[] = {step(strides.row), step(strides.head), step(strides.batch[0])};
  const uint32_t box[] = {64, static_cast<uint32_t>(rows_of_box), 1, 1}, every[] = {1, 1, 1, 1};
  TensorMap map;
  FLASHATTN_CALL(cuTensorMapEncodeTiled, &map, array.dtype() == mx::bfloat16 ? kBfloat16 : kFloat16, std::size(sizes),
                 address(array), sizes, steps, box, every, kNotInterleaved, kSwizzle128, kIntoL2By256, kZeros);
  return map;
}

}  // namespace

void allocate(mx::array& output, mx::Stream stream) {
  // Of an input without elements, which is not contiguous, Exp gives the output memory and launches nothing.
  static const auto& nothing = *new std::vector<mx::array>{minus_infinities(0)};
  mx::Exp(stream).eval_gpu(nothing, output);
}

void release_scratch() {
  for (const auto& [stream, kept] : std::exchange(kept_scratch, {})) {
    mx::synchronize(stream);
  }
}

gpu::Device device() {
  static const gpu::Device first = mx::cu::is_available() ? properties(0) : gpu::Device{};
  return first;
}

void encode(const Work& work, mx::Stream stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const Launches& launches = *work.launches;
  std::vector<mx::array> alive = work.temporaries;  // until the GPU is done
  const Kept* scratch = launches.scratch.empty() ? nullptr : &kept(launches.scratch, stream);
  if (scratch) {
    alive.push_back(scratch->array);
  }
  for (const Launch& launch : launches.launches) {
    CUfunction function = function_of(launch, stream.device.index);
    BoxArguments arguments = {{{}, launches.split, launches.params, launches.realign}, {}, {}, {}};
    for (auto [binding, role] : launch.arguments) {
      if (role == Role::value || binding == Binding::arrivals || binding == Binding::partials) continue;
      const mx::array& array = work.arrays[index(binding)].value();
      role == Role::input ? encoder.set_input_array(array) : encoder.set_output_array(array);
      arguments.arrays[index(binding)] = address(array);
    }
    if (scratch) {
      encoder.set_output_array(scratch->array);
      void* counters = arguments.arrays[index(Binding::arrivals)] = address(scratch->array);
      arguments.arrays[index(Binding::partials)] = static_cast<uint32_t*>(counters) + scratch->counters;
    }
    if (!launch.box_rows.empty()) {
      const auto map = [&](Binding binding, const Strides& strides) {
        return tensor_map(*work.arrays[index(binding)], strides, launch.box_rows[index(binding)]);
      };
      arguments.query_map = map(Binding::query, launches.params.query);
      arguments.key_map = map(Binding::key, launches.params.key);
      arguments.value_map = map(Binding::value, launches.params.value);
    }
    void* parameters[] = {&arguments};
    encoder.add_kernel_node_raw(function, {launch.grid[0], launch.grid[1], launch.grid[2]},
                                {launch.threadgroup[0], launch.threadgroup[1], launch.threadgroup[2]}, {},
                                launch.dynamic_shared, parameters);
  }
  if (!alive.empty()) {
    encoder.add_completed_handler([alive = std::move(alive)] {});
  }
}

}  // namespace flashattn::cuda
