#include "inspect.h"

#include <nanobind/stl/string.h>

#include <string>

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
    case kDq:
    case kDk:
    case kDv: return nb::int_(work.arrays[binding]->nbytes());
    case kPartialOut: return nb::int_(sizeof(float) * work.launches.partial_rows * work.params.value_dim);
    case kPartialMax:
    case kPartialSum: return nb::int_(sizeof(float) * work.launches.partial_rows);
    case kDelta: return nb::int_(sizeof(float) * work.launches.delta_rows);
    case kParams: return bytes_of(work.params);
    case kSplitParams: return bytes_of(work.launches.split);
    case kBackwardParams: return bytes_of(work.backward);
    default: return memory(work.arrays[binding].value());
  }
}

nb::tuple size(const Size& size) {
  return nb::make_tuple(size[0], size[1], size[2]);
}

}  // namespace

nb::list inspect(const Work& work) {
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

}  // namespace flashattn::metal
