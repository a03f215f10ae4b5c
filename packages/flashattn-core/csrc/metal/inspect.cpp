// Launches and the bytes that they read, as Python's own types: for tests.
#include "inspect.h"

#include <nanobind/stl/string.h>

#include <string>

#include "../attention.h"
#include "../backend_call.h"
#include "mlx/transforms.h"

namespace nb = nanobind;

namespace flashattn::metal {
namespace {

template <typename T>
nb::bytes bytes_of(const T& value) {
  return nb::bytes(&value, sizeof(T));
}

// The memory from an array's lowest element to its highest, and where in it the element at index 0 is.
nb::tuple memory(const mx::array& array) {
  if (array.size() == 0) {
    return nb::make_tuple(nb::bytes("", 0), 0);
  }
  int64_t lowest = 0, highest = 0;
  for (int axis = 0; axis < static_cast<int>(array.ndim()); ++axis) {
    int64_t last = (array.shape(axis) - 1) * array.strides(axis);
    (last < 0 ? lowest : highest) += last;
  }
  int64_t itemsize = static_cast<int64_t>(array.itemsize());
  return nb::make_tuple(
      nb::bytes(array.data<char>() + lowest * itemsize, static_cast<size_t>((highest + 1 - lowest) * itemsize)),
      -lowest * itemsize);
}

nb::object buffer(const Work& work, Binding binding) {
  switch (binding) {
    case kOut:
    case kLse:
    case kDelta:
    case kDq:
    case kDk:
    case kDv: return nb::int_(work.arrays[binding]->nbytes());
    case kPartialOut: return nb::int_(sizeof(float) * work.launches.partial_rows * work.params.value_dim);
    case kPartialMax:
    case kPartialSum: return nb::int_(sizeof(float) * work.launches.partial_rows);
    case kParams: return bytes_of(work.params);
    case kSplitParams: return bytes_of(work.launches.split);
    case kQuantParams: return bytes_of(work.quant);
    case kBackwardParams: return bytes_of(work.backward);
    default: return memory(work.arrays[binding].value());
  }
}

nb::tuple size(const Size& size) {
  return nb::make_tuple(size[0], size[1], size[2]);
}

// Inputs must be evaluated; nothing reads the outputs' memory.
nb::list described(const Work& work) {
  nb::list result;
  for (const Launch& launch : work.launches.launches) {
    nb::dict constants, buffers, description;
    for (const auto& [index, value] : launch.constants) {
      constants[nb::int_(index)] = std::visit([](auto number) { return nb::cast(number); }, value);
    }
    for (Binding binding : launch.bindings) {
      buffers[nb::int_(int{binding})] = buffer(work, binding);
    }
    description["source"] = source_text(launch);
    description["function"] = launch.function;
    description["constants"] = constants;
    description["grid"] = size(launch.grid);
    description["threadgroup"] = size(launch.threadgroup);
    description["buffers"] = buffers;
    const SplitParams& split = work.launches.split;
    description["split"] = nb::make_tuple(split.first_key, split.chunk_len, split.num_chunks);
    description["partial_rows"] = work.launches.partial_rows;
    result.append(description);
  }
  return result;
}

mx::array not_allocated(mx::Shape shape, mx::Dtype dtype) {
  return mx::array(std::move(shape), dtype, nullptr, std::vector<mx::array>{});
}

}  // namespace

nb::list inspect_forward(const Arguments& arguments) {
  Kernel kernel = kernel_of(plan(arguments, Backend::metal));
  std::vector<mx::array> inputs = primitive_inputs(arguments, mx::to_stream({}));
  mx::eval(inputs);
  std::vector<mx::Shape> shapes = shapes_of_outputs(Inputs(arguments), arguments.options);
  return described(metal_forward(kernel, Inputs(inputs, present_in(arguments)), arguments.options,
                                 not_allocated(shapes[0], arguments.query.dtype()),
                                 not_allocated(shapes[1], mx::float32)));
}

nb::list inspect_backward(const Arguments& arguments, const mx::array& out, const mx::array& lse,
                          const mx::array& out_gradient, const std::optional<mx::array>& lse_gradient) {
  plan(arguments, Backend::metal);
  std::vector<mx::array> inputs = primitive_inputs(arguments, mx::to_stream({}));
  std::vector<mx::array> evaluated = inputs;
  evaluated.insert(evaluated.end(), {out, lse, out_gradient});
  if (lse_gradient) {
    evaluated.push_back(*lse_gradient);
  }
  mx::eval(evaluated);
  Inputs named(inputs, present_in(arguments));
  check_backward(Backend::metal, call_shape(named, arguments.options));
  std::vector<mx::array> gradients;
  for (const mx::array& input : {named.query, named.key, named.value}) {
    gradients.push_back(not_allocated(input.shape(), input.dtype()));
  }
  gradients.push_back(not_allocated(lse.shape(), mx::float32));
  Saved saved = {out, lse, out_gradient, lse_gradient ? &*lse_gradient : nullptr};
  return described(metal_backward(named, arguments.options, saved, gradients));
}

}  // namespace flashattn::metal
