// Hands launches to MLX's command encoder; compiled where MLX has Metal.
#include "encode.h"

#include <limits>
#include <stdexcept>
#include <string>

#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"
#include "mlx/backend/metal/utils.h"

namespace flashattn::metal {
namespace {

bool is_output(Binding binding) {
  return binding == kOut || binding == kLse || binding == kDq || binding == kDk || binding == kDv;
}
// What the first launch writes and later ones read.
bool is_between(Binding binding) {
  return binding == kPartialOut || binding == kPartialMax || binding == kPartialSum || binding == kDelta;
}

MTL::Size mtl_size(const Size& size) {
  return MTL::Size(size[0], size[1], size[2]);
}

// Pointers into `constants`, which has to outlive them.
mx::metal::MTLFCList function_constants(const std::vector<Constant>& constants) {
  mx::metal::MTLFCList list;
  for (const auto& [index, value] : constants) {
    if (const bool* flag = std::get_if<bool>(&value)) {
      list.emplace_back(flag, MTL::DataTypeBool, index);
    } else {
      list.emplace_back(&std::get<int32_t>(value), MTL::DataTypeInt, index);
    }
  }
  return list;
}

// MLX keeps pipelines by this name: the function, and the constants that it is specialised for.
std::string pipeline_name(const Launch& launch) {
  std::string name = launch.function;
  for (const auto& [index, value] : launch.constants) {
    name += "_" + std::to_string(index) + "_";
    name += std::visit([](auto number) { return std::to_string(number); }, value);
  }
  return name;
}

// Compiled at first use. MLX compiles in its safe math mode, which infinities and NaN need.
MTL::ComputePipelineState* pipeline(mx::metal::Device& device, const Launch& launch) {
  MTL::Library* library = device.get_library("flashattn_core_" FLASHATTN_VERSION "_" + launch.function,
                                             [&] { return source_text(launch); });
  return device.get_kernel(launch.function, library, pipeline_name(launch), function_constants(launch.constants));
}

mx::array scratch(mx::metal::CommandEncoder& encoder, int64_t rows, int columns) {
  if (rows > std::numeric_limits<mx::ShapeElem>::max()) {
    throw std::runtime_error("[flash_attention] the call needs " + std::to_string(rows) + " rows of partial results");
  }
  mx::Shape shape = {static_cast<mx::ShapeElem>(rows), columns};
  mx::array array(mx::allocator::malloc(sizeof(float) * rows * columns), std::move(shape), mx::float32);
  encoder.add_temporary(array);  // alive until the GPU is done
  return array;
}

}  // namespace

void encode(const Work& work, mx::Stream stream) {
  auto& device = mx::metal::device(stream.device);
  auto& encoder = mx::metal::get_command_encoder(stream);

  auto arrays = work.arrays;
  if (int64_t rows = work.launches.partial_rows; rows > 0) {
    arrays[kPartialOut] = scratch(encoder, rows, work.params.value_dim);
    arrays[kPartialMax] = scratch(encoder, rows, 1);
    arrays[kPartialSum] = scratch(encoder, rows, 1);
  }

  bool first = true;
  for (const Launch& launch : work.launches.launches) {
    MTL::ComputePipelineState* kernel = pipeline(device, launch);
    MTL::Size threadgroup = mtl_size(launch.threadgroup);
    mx::check_kernel_threadgroup_size(kernel, threadgroup, launch.function);
    encoder.set_compute_pipeline_state(kernel);
    for (Binding binding : launch.bindings) {
      // The encoder waits for a launch before another one that has its outputs as inputs: a barrier comes
      // between writing partial results, or delta, and reading them.
      if (binding == kParams) {
        encoder.set_bytes(work.params, kParams);
      } else if (binding == kSplitParams) {
        encoder.set_bytes(work.launches.split, kSplitParams);
      } else if (binding == kQuantParams) {
        encoder.set_bytes(work.quant, kQuantParams);
      } else if (binding == kBackwardParams) {
        encoder.set_bytes(work.backward, kBackwardParams);
      } else if (!arrays[binding]) {
        throw std::logic_error(launch.function + " takes an array that the call does not have, binding " +
                               std::to_string(binding));
      } else if (is_output(binding) || (is_between(binding) && first)) {
        encoder.set_output_array(*arrays[binding], binding);
      } else {
        encoder.set_input_array(*arrays[binding], binding);
      }
    }
    encoder.dispatch_threadgroups(mtl_size(launch.grid), threadgroup);
    first = false;
  }
}

}  // namespace flashattn::metal
