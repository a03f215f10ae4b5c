// Hands launches to MLX's command encoder. This file is compiled only where MLX has Metal.
#include "../gpu/encode.h"

#include <limits>
#include <stdexcept>
#include <string>

#include "launch.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"
#include "mlx/backend/metal/utils.h"

namespace flashattn::metal {
namespace {

using namespace gpu;

MTL::Size mtl_size(const Size& size) {
  return MTL::Size(size[0], size[1], size[2]);
}

// The values of the function constants that source_text() declares. The list points into `constants`.
mx::metal::MTLFCList function_constants(const std::vector<Constant>& constants) {
  mx::metal::MTLFCList list;
  for (size_t i = 0; i < constants.size(); ++i) {
    if (const bool* flag = std::get_if<bool>(&constants[i].value)) {
      list.emplace_back(flag, MTL::DataTypeBool, i);
    } else {
      list.emplace_back(&std::get<int32_t>(constants[i].value), MTL::DataTypeInt, i);
    }
  }
  return list;
}

// The kernel's pipeline. MLX compiles it at first use, in its safe math mode. Kernels depend on this mode, because it
// keeps infinities and NaN.
MTL::ComputePipelineState* pipeline(mx::metal::Device& device, const Launch& launch) {
  MTL::Library* library = device.get_library("flashattn_core_" FLASHATTN_VERSION "_" + launch.function,
                                             [&] { return source_text(launch); });
  return device.get_kernel(launch.function, library, launch.specialisation, function_constants(launch.constants));
}

mx::array allocated(const Scratch& scratch) {
  if (scratch.elements > std::numeric_limits<mx::ShapeElem>::max()) {
    throw std::runtime_error("[flash_attention] the call's partial results are " + std::to_string(scratch.elements) +
                             " numbers, more than one array of MLX can hold");
  }
  mx::Shape shape = {static_cast<mx::ShapeElem>(scratch.elements)};
  return mx::array(mx::allocator::malloc(sizeof(float) * scratch.elements), std::move(shape), mx::float32);
}

}  // namespace

void encode(const gpu::Work& work, mx::Stream stream) {
  auto& device = mx::metal::device(stream.device);
  auto& encoder = mx::metal::get_command_encoder(stream);

  for (const mx::array& temporary : work.temporaries) {
    encoder.add_temporary(temporary);
  }
  auto arrays = work.arrays;
  for (const Scratch& scratch : work.launches->scratch) {
    arrays[index(scratch.binding)] = allocated(scratch);
    encoder.add_temporary(*arrays[index(scratch.binding)]);  // alive until the GPU is done
  }

  for (const Launch& launch : work.launches->launches) {
    MTL::ComputePipelineState* kernel = pipeline(device, launch);
    MTL::Size threadgroup = mtl_size(launch.threadgroup);
    mx::check_kernel_threadgroup_size(kernel, threadgroup, launch.function);
    encoder.set_compute_pipeline_state(kernel);
    for (auto [binding, role] : launch.arguments) {
      int buffer = buffer_of(binding);
      if (role == Role::value) {
        auto bytes = value_of(*work.launches, binding);
        encoder.set_bytes(bytes.data(), static_cast<int>(bytes.size()), buffer);
        continue;
      }
      auto& array = arrays[index(binding)];
      if (!array) {
        throw std::logic_error(launch.function + " takes " + std::string(name(binding)) +
                               ", which the call does not have");
      }
      // The encoder puts a barrier between a launch that writes an array and a launch that reads it.
      if (role == Role::output) {
        encoder.set_output_array(*array, buffer);
      } else {
        encoder.set_input_array(*array, buffer);
      }
    }
    encoder.dispatch_threadgroups(mtl_size(launch.grid), threadgroup);
  }
}

}  // namespace flashattn::metal
