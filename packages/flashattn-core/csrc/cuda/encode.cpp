// Launches as nodes of MLX's graphs.
#include "encode.h"

#include <bit>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "mlx/allocator.h"
#include "mlx/backend/cuda/cuda.h"
#include "mlx/primitives.h"
#include "mlx_cuda.h"
#include "programs.h"

namespace flashattn::cuda {
namespace {

using namespace gpu;

// Scratch that the stream keeps, one array for each binding: zeros at first, and then what launches leave there. These
// run one behind the other, since all of them write it.
mx::array kept(const Scratch& scratch, mx::Stream stream) {
  static std::mutex mutex;
  static auto& arrays = *new std::map<std::pair<int, Binding>, mx::array>;  // never destroyed: MLX may be gone by then
  std::lock_guard lock(mutex);
  auto found = arrays.find({stream.index, scratch.binding});
  if (found != arrays.end() && static_cast<int64_t>(found->second.size()) >= scratch.elements()) {
    return found->second;
  }
  if (scratch.elements() > std::numeric_limits<mx::ShapeElem>::max() / 2) {
    throw std::runtime_error("[flash_attention] the call needs " + std::to_string(scratch.elements()) +
                             " numbers of partial results");
  }
  auto size = static_cast<mx::ShapeElem>(std::bit_ceil(static_cast<uint64_t>(scratch.elements())));
  // As many numbers -inf as one, and exp() makes them zeros: of MLX's ops that fill an array no other is exported.
  static const auto& minus_infinity = *new mx::array(-std::numeric_limits<float>::infinity());
  mx::array many({size}, mx::float32, nullptr, {});
  many.copy_shared_buffer(minus_infinity, {0}, {.contiguous = false, .row_contiguous = false, .col_contiguous = false},
                          1);
  auto exp = std::make_shared<mx::Exp>(stream);
  mx::array made({size}, mx::float32, exp, {});
  exp->eval_gpu({many}, made);
  if (found != arrays.end()) {  // launches that are on their way may still use it
    mx::cu::get_command_encoder(stream).add_completed_handler([old = found->second] {});
  }
  return arrays.insert_or_assign({stream.index, scratch.binding}, made).first->second;
}

using Arrays = std::array<const mx::array*, kNumBindings>;  // null: the call does not have it

// All that a kernel is given: what its launch has, and null for the rest.
Arguments arguments_of(const Work& work, const Launch& launch, const Arrays& arrays) {
  Arguments result = {.params = work.launches->params,
                      .split = work.launches->split,
                      .realign_params = work.launches->realign,
                      .arrays = {},
                      .query_map = {},
                      .key_map = {},
                      .value_map = {}};
  for (auto [binding, role] : launch.arguments) {
    if (role == Role::value) {
      continue;
    }
    const mx::array* array = arrays[index(binding)];
    if (!array) {
      throw std::logic_error(launch.function + " takes " + std::string(name(binding)) +
                             ", which the call does not have");
    }
    result.arrays[index(binding)] = address(*array);
  }
  if (!launch.box_rows.empty()) {
    const AttentionParams& p = result.params;
    const auto map = [&](Binding binding, const Strides& strides, int columns, int length, int heads) {
      const auto bytes = [](int64_t step) { return step != 0 ? static_cast<uint64_t>(2 * step) : 16; };
      return tensor_map({.bfloat = arrays[index(binding)]->dtype() == mx::bfloat16,
                         .address = result.arrays[index(binding)],
                         .sizes = {static_cast<uint64_t>(columns), static_cast<uint64_t>(length),
                                   static_cast<uint64_t>(heads), static_cast<uint64_t>(p.batch_size)},
                         .steps = {bytes(strides.row), bytes(strides.head), bytes(strides.batch[0])},
                         .rows = launch.box_rows[index(binding)]});
    };
    result.query_map = map(Binding::query, p.query, p.head_dim, p.query_len, p.num_heads);
    result.key_map = map(Binding::key, p.key, p.head_dim, p.key_len, p.num_kv_heads);
    result.value_map = map(Binding::value, p.value, p.value_dim, p.key_len, p.num_kv_heads);
  }
  return result;
}

}  // namespace

void allocate(mx::array& output, mx::Stream stream) {
  // MLX exports no function that allocates so. Exp does it: of an input without elements, which is not contiguous, it
  // gives the output memory and launches nothing.
  static const std::vector<mx::array>& nothing = *[] {  // never destroyed: MLX may be gone by then
    mx::array empty({0}, mx::float32, nullptr, {});
    empty.set_data(mx::allocator::malloc(0), 0, {1},
                   {.contiguous = false, .row_contiguous = false, .col_contiguous = false});
    return new std::vector<mx::array>{empty};
  }();
  mx::Exp(stream).eval_gpu(nothing, output);
}

void* address(const mx::array& array) {
  return static_cast<char*>(static_cast<const mx::cu::CudaBuffer*>(array.buffer().ptr())->data) + array.offset();
}

void check(mx::Device device) {
  check_device(device.index);
}

gpu::Device device() {
  static const gpu::Device first = mx::cu::is_available() ? properties(0) : gpu::Device{};
  return first;
}

std::string describe(mx::Device device) {
  return std::get<std::string>(mx::device_info(device).at("device_name")) + ", " + architecture(device.index) +
         ", driver for CUDA " + driver_version() + ", NVRTC " + nvrtc_version();
}

void encode(const Work& work, mx::Stream stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  Arrays arrays = {};
  for (int i = 0; i < kNumBindings; ++i) {
    arrays[i] = work.arrays[i] ? &*work.arrays[i] : nullptr;
  }
  std::vector<mx::array> scratch;
  scratch.reserve(work.launches->scratch.size());
  for (const Scratch& wanted : work.launches->scratch) {
    arrays[index(wanted.binding)] = &scratch.emplace_back(kept(wanted, stream));
  }
  if (!work.temporaries.empty()) {
    encoder.add_completed_handler([temporaries = work.temporaries] {});
  }
  for (const Launch& launch : work.launches->launches) {
    for (auto [binding, role] : launch.arguments) {
      if (role == Role::input) {
        encoder.set_input_array(*arrays[index(binding)]);
      } else if (role == Role::output) {
        encoder.set_output_array(*arrays[index(binding)]);
      }
    }
    Arguments arguments = arguments_of(work, launch, arrays);
    void* parameters[] = {&arguments};
    encoder.add_kernel_node_raw(
        function_of(launch, stream.device.index), {launch.grid[0], launch.grid[1], launch.grid[2]},
        {launch.threadgroup[0], launch.threadgroup[1], launch.threadgroup[2]}, {}, launch.dynamic_shared, parameters);
  }
}

}  // namespace flashattn::cuda
