// What both primitives do alike: vmap, equivalence, allocation, alignment.
#include "primitive.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "checks.h"
#include "mlx/allocator.h"
#include "mlx/ops.h"
#include "params.h"

namespace flashattn {
namespace {

// An input's dimensions behind the batch's, and whether it has all of the batch's, or broadcasts.
struct InputDims {
  int own;
  bool whole;
};

// Of query, key, value and the optional inputs that there are.
std::vector<InputDims> input_dims(const Present& present) {
  constexpr std::array<InputDims, kNumOptionalInputs> kOptional = {{{0, false},
                                                                    {0, false},
                                                                    {2, false},
                                                                    {3, false},
                                                                    {3, false},
                                                                    {1, false},
                                                                    {1, false},
                                                                    {3, true},
                                                                    {3, true},
                                                                    {3, true},
                                                                    {3, true}}};
  std::vector<InputDims> dims(3, {3, true});
  for (int i = 0; i < kNumOptionalInputs; ++i) {
    if (present[i]) {
      dims.push_back(kOptional[i]);
    }
  }
  return dims;
}

// The inputs with the mapped axis as the first batch dimension. Those that are whole must have
// the axis; the others broadcast, so an unmapped one stays as it is.
std::vector<mx::array> mapped_inputs(const std::vector<mx::array>& inputs, const std::vector<int>& axes,
                                     const std::vector<InputDims>& dims, const mx::Stream& stream) {
  int size = 1;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) {
      size = inputs[i].shape(axes[i]);
    }
  }
  int batch_dims = static_cast<int>(inputs[0].ndim()) - (axes[0] >= 0 ? 1 : 0) - dims[0].own;
  if (batch_dims + 1 > kMaxBatchDims) {
    fail("vmap makes ", batch_dims + 1, " batch dimensions, expected at most ", kMaxBatchDims);
  }
  std::vector<mx::array> mapped;
  for (size_t i = 0; i < inputs.size(); ++i) {
    mx::array input = inputs[i];
    if (axes[i] >= 0) {
      input = mx::moveaxis(input, axes[i], 0, stream);
      // Dimensions that the input leaves to broadcasting come between the mapped one and its own.
      std::vector<int> missing;
      for (int n = static_cast<int>(input.ndim()); n < 1 + batch_dims + dims[i].own; ++n) {
        missing.push_back(1 + static_cast<int>(missing.size()));
      }
      if (!missing.empty()) {
        input = mx::expand_dims(input, missing, stream);
      }
    } else if (dims[i].whole) {
      mx::Shape shape = input.shape();
      shape.insert(shape.begin(), size);
      input = mx::broadcast_to(input, shape, stream);
    }
    mapped.push_back(std::move(input));
  }
  return mapped;
}

void allocate(mx::array& output) {
  mx::allocator::Data data = mx::allocator::malloc(output.nbytes());
  if (output.nbytes() > 0 && !data.buffer().ptr()) {  // MLX leaves it to the caller to look
    throw std::runtime_error("[flash_attention] no memory for an array of " + std::to_string(output.nbytes()) +
                             " bytes");
  }
  output.set_data(std::move(data));
}

bool is_aligned(const mx::array& input) {
  return reinterpret_cast<uintptr_t>(input.data<void>()) % input.itemsize() == 0;
}

}  // namespace

std::pair<std::vector<mx::array>, std::vector<int>> AttentionPrimitive::vmap(const std::vector<mx::array>& inputs,
                                                                             const std::vector<int>& axes) {
  std::vector<InputDims> dims = input_dims(present_);
  for (int own : dims_of_further_inputs()) {
    dims.push_back({own, true});
  }
  std::vector<mx::array> mapped = mapped_inputs(inputs, axes, dims, stream());
  std::vector<mx::Shape> shapes = output_shapes(mapped);
  std::vector<mx::Dtype> dtypes = output_dtypes(mapped);
  std::vector<int> output_axes(shapes.size(), 0);
  return {mx::array::make_arrays(std::move(shapes), dtypes, copy(), std::move(mapped)), output_axes};
}

bool AttentionPrimitive::is_equivalent(const mx::Primitive& other) const {
  const auto& attention = static_cast<const AttentionPrimitive&>(other);
  return options_ == attention.options_ && present_ == attention.present_;
}

Backend backend_of(const mx::Stream& stream) {
  return stream.device == mx::Device::cpu ? Backend::cpu : Backend::metal;
}

void allocate(std::vector<mx::array>& outputs) {
  for (mx::array& output : outputs) {
    allocate(output);
  }
}

bool are_aligned(const std::vector<mx::array>& inputs) {
  return std::all_of(inputs.begin(), inputs.end(), is_aligned);
}

std::vector<mx::array> aligned(const std::vector<mx::array>& inputs, const mx::Stream& stream) {
  std::vector<mx::array> result = inputs;
  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (mx::array& input : result) {
    if (!is_aligned(input)) {
      mx::array copy(input.shape(), input.dtype(), nullptr, {});
      allocate(copy);
      encoder.dispatch([from = input.data<char>(), to = copy.data<char>(), shape = input.shape(),
                        strides = input.strides(), count = static_cast<int64_t>(input.size()),
                        size = static_cast<int64_t>(input.itemsize())] {
        for (int64_t i = 0; i < count; ++i) {
          int64_t offset = 0, rest = i;
          for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) offset += rest % shape[d] * strides[d];
          std::memcpy(to + i * size, from + offset * size, size);
        }
      });
      encoder.add_temporary(copy);
      input = copy;
    }
  }
  return result;
}

mx::cpu::CommandEncoder& cpu_encoder(const mx::Stream& stream, const std::vector<mx::array>& inputs,
                                     std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (const mx::array& input : inputs) {
    encoder.set_input_array(input);
  }
  for (mx::array& output : outputs) {
    encoder.set_output_array(output);
  }
  return encoder;
}

}  // namespace flashattn
