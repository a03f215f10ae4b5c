// Describes the launches of a call on a GPU in Python's own types: texts, constants, grids, and the bytes of inputs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/driver.h"
#include "cuda/launch.h"
#include "dispatch/gpu_call.h"
#include "metal/launch.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "op/sinks_gradient.h"
#include "request/arguments.h"
#include "request/checks.h"
#include "request/select.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace flashattn;

// Replaces the function of driver.cpp, which needs a GPU.
namespace flashattn::cuda {
Device properties(int) {
  throw std::logic_error("this module asks no GPU");
}
}  // namespace flashattn::cuda

namespace {

Device asked_about = {.backend = Backend::cuda};  // the NVIDIA GPU that launches are for

Device device_named(const std::string& backend) {
  if (backend == "cuda") return asked_about;
  return {.backend = backend_of(backend)};
}

// Returns an array's bytes in the order of memory, and the byte offset of its element at index 0.
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

// Returns the size in bytes of an array that the launches write.
nb::object unwritten(const gpu::Work& work, gpu::Binding binding) {
  for (const gpu::Scratch& scratch : work.launches->scratch) {
    if (scratch.binding == binding) {
      return nb::int_(sizeof(float) * scratch.elements);
    }
  }
  return nb::int_(work.arrays[gpu::index(binding)].value().nbytes());
}

nb::dict buffers_of(const gpu::Work& work, const gpu::Launch& launch, nb::set& written) {
  nb::dict buffers;
  for (auto [binding, role] : launch.arguments) {
    nb::str name(std::string(gpu::name(binding)).c_str());
    if (role == gpu::Role::value) {
      auto bytes = gpu::value_of(*work.launches, binding);
      buffers[name] = nb::bytes(bytes.data(), bytes.size());
    } else if (role == gpu::Role::output || written.contains(name) || !work.arrays[gpu::index(binding)]) {
      buffers[name] = unwritten(work, binding);
      written.add(name);
    } else {
      buffers[name] = memory(work.arrays[gpu::index(binding)].value());
    }
  }
  return buffers;
}

nb::tuple size(const gpu::Size& size) {
  return nb::make_tuple(size[0], size[1], size[2]);
}

// The call's inputs must have been evaluated. Its outputs need not be allocated.
nb::list described(const gpu::Work& work, Backend backend) {
  const bool is_cuda = backend == Backend::cuda;
  nb::list result;
  nb::set written;
  for (const gpu::Launch& launch : work.launches->launches) {
    nb::dict constants, numbers, description;
    nb::list tensor_maps, outputs, scratch;
    for (const gpu::Constant& constant : launch.constants) {
      constants[nb::cast(constant.name)] = std::visit([](auto number) { return nb::cast(number); }, constant.value);
    }
    for (auto [binding, role] : launch.arguments) {
      nb::object name = nb::cast(gpu::name(binding));
      numbers[name] = is_cuda ? gpu::index(binding) : metal::buffer_of(binding);
      if (role == gpu::Role::output) outputs.append(name);
    }
    for (const gpu::MappedArray& each : launch.tensor_maps) {
      tensor_maps.append(nb::cast(gpu::name(each.array)));
    }
    for (const gpu::Scratch& each : work.launches->scratch) scratch.append(nb::cast(gpu::name(each.binding)));
    description["source"] = is_cuda ? cuda::source_text(launch) : metal::source_text(launch);
    description["dynamic_shared"] = launch.dynamic_shared;
    description["with_next"] = launch.with_next;
    description["tensor_maps"] = tensor_maps;
    description["function"] = launch.function;
    description["specialisation"] = launch.specialisation;
    description["constants"] = constants;
    description["grid"] = size(launch.grid);
    description["threadgroup"] = size(launch.threadgroup);
    nb::dict buffers = buffers_of(work, launch, written);
    if (!launch.tensor_maps.empty()) {
      buffers["tensor_maps"] =
          nb::bytes(launch.tensor_maps.data(), launch.tensor_maps.size() * sizeof(gpu::MappedArray));
    }
    description["buffers"] = buffers;
    description["outputs"] = outputs;
    description["scratch"] = scratch;
    description["numbers"] = numbers;
    const SplitParams& split = work.launches->split;
    description["split"] = nb::make_tuple(split.first_key, split.chunk_len, split.num_chunks);
    result.append(description);
  }
  return result;
}

mx::array not_allocated(mx::Shape shape, mx::Dtype dtype) {
  return mx::array(std::move(shape), dtype, nullptr, std::vector<mx::array>{});
}

// A primitive's inputs. Unlike the op, the constructor makes a block map for an array mask even if there are few keys.
struct PrimitiveInputs {
  std::vector<mx::array> arrays;
  Present present;

  PrimitiveInputs(const Arguments& arguments, Backend backend) : present(present_in(arguments)) {
    check_arguments(arguments);
    Arguments all = arguments;
    const mx::array& query = *arguments.inputs[index(Input::query)];
    nb::object map = nb::module_::import_("flashattn_core._ext").attr("block_map")(arguments);
    if (has_block_map(backend, query.shape(kRow), kMaxPositions) && !map.is_none()) {
      all.inputs[index(Input::block_map)] = nb::cast<mx::array>(map);
      present = present_in(all);
    }
    arrays = primitive_inputs(all, backend, mx::to_stream({}));
    mx::eval(arrays);
  }
  Inputs named() const { return Inputs(arrays, present); }
};

nb::list forward(const Arguments& arguments, const std::string& backend, bool with_lse, bool with_exact_out,
                 std::optional<bool> small_blocks) {
  Device device = device_named(backend);
  PrimitiveInputs inputs(arguments, device.backend);
  Inputs named = inputs.named();
  Call call = describe(named, arguments.options);
  Variant variant = choose(call, device, arguments.kernel).variant;
  variant.small_blocks = small_blocks.value_or(variant.small_blocks && !arguments.kernel);
  mx::Shape rows(named.query().shape().begin(), named.query().shape().end() - 1), wide = rows, stats = rows;
  wide.push_back(call.params.value_dim);
  stats.push_back(2);
  mx::array out = not_allocated(wide, named.query().dtype()), lse = not_allocated(rows, mx::float32);
  mx::array row_stats = not_allocated(stats, mx::float32);
  mx::array exact_out = not_allocated(wide, mx::float32);
  for (mx::array* each : {&out, &exact_out}) order_by_query(*each);
  Outputs outputs = {out, with_lse ? &lse : nullptr, with_lse ? &row_stats : nullptr,
                     with_exact_out ? &exact_out : nullptr};
  gpu::Work work = forward_work(variant, call, device, named, outputs);
  return described(work, device.backend);
}

nb::list backward(const Arguments& arguments, const mx::array& out, const mx::array& lse, const mx::array& row_stats,
                  const mx::array& out_gradient, const mx::array& lse_gradient, const std::string& backend) {
  Device device = device_named(backend);
  PrimitiveInputs inputs(arguments, device.backend);
  mx::eval(out, lse, row_stats, out_gradient, lse_gradient);
  Inputs named = inputs.named();
  Call call = describe(named, arguments.options, true);
  mx::Dtype dtype = named.query().dtype();
  mx::array query = not_allocated(named.query().shape(), dtype);
  mx::array key = not_allocated(named.key().shape(), dtype);
  mx::array value = not_allocated(named.value().shape(), dtype);
  mx::array delta = not_allocated(lse.shape(), mx::float32);
  return described(
      backward_work(backward_variant(call, device), call, device, named,
                    {{out, &lse, &row_stats, out.dtype() == dtype ? nullptr : &out}, out_gradient, lse_gradient},
                    {query, key, value, delta}),
      device.backend);
}

// Selects the kernel of a call on a GPU, as the op does. check: kernel's name -> what is wrong. Returns nothing if
// MLX's own attention should compute the call.
std::optional<std::string> selected(const Arguments& arguments, const std::string& backend, const nb::callable& check,
                                    bool may_leave) {
  Device device = device_named(backend);
  Call call = describe(arguments);
  const auto checked = [&](Variant variant) { return nb::cast<std::string>(check(std::string(name(variant.kernel)))); };
  std::optional<Selection> selection = select(arguments, call, device, may_leave, checked);
  if (!selection) return std::nullopt;
  return std::string(name(variant_for(*selection, call, device).kernel));
}

std::vector<std::string> programs(const Arguments& arguments, const std::string& backend) {
  Device device = device_named(backend);
  Call call = describe(arguments);
  std::vector<std::string> functions;
  for (const gpu::Launch& launch : programs_of(choose(call, device, arguments.kernel).variant, call, device)) {
    functions.push_back(launch.specialisation);
  }
  return functions;
}

nb::list block_map(mx::array mask, const std::string& device) {
  Backend backend = backend_of(device);
  mx::eval(mask);
  ArrayParams params = {.count = 1, .ndim = static_cast<int32_t>(mask.ndim()), .shape = {}, .strides = {}};
  mx::Shape shape = mask.shape();
  for (int axis : {kRow, kColumn}) *(shape.end() + axis) = blocks_of(mask.shape(axis));
  for (int d = 0; d < params.ndim; ++d) {
    params.shape[d] = mask.shape(d);
    params.strides[d] = mask.strides(d);
    params.count *= shape[d];
  }
  return described(block_map_work(backend, mask, params, not_allocated(shape, mx::uint8)), backend);
}

nb::list append(std::vector<mx::array> stored, const mx::array& keys, const mx::array& values, int offset,
                int group_size, int bits, const std::vector<bool>& in_place) {
  stored.insert(stored.end(), {keys, values});
  mx::eval(stored);
  std::vector<mx::array> outputs;
  std::array<bool, 6> each;
  for (size_t i = 0; i < each.size(); ++i) {
    outputs.push_back(not_allocated(stored[i].shape(), stored[i].dtype()));
    each[i] = in_place[i];
  }
  return described(append_work(stored, outputs, each, offset, group_size, bits), Backend::cuda);
}

}  // namespace

NB_MODULE(flashattn_launches, m) {
  nb::module_::import_("flashattn_core");  // registers the arguments' type
  m.def("sources", &metal::sources, "The Metal kernels' texts by the name of their file.");
  m.def("forward", &forward, "arguments"_a, "device"_a = "metal", "with_lse"_a = true, "with_exact_out"_a = false,
        "small_blocks"_a = nb::none(),
        "The launches of a call. Raises what the call raises. small_blocks: None means that a call by name has large\n"
        "blocks, and that the call's sizes decide for others.");
  m.def(
      "exchange_gpu",
      [](int shared_memory, int compute_capability) {
        Device before = asked_about;
        asked_about = {
            .backend = Backend::cuda, .compute_capability = compute_capability, .shared_memory = shared_memory};
        return std::pair(before.shared_memory, before.compute_capability);
      },
      "shared_memory"_a, "compute_capability"_a,
      "Sets the NVIDIA GPU that launches are for: the bytes that a block can have, and 90 for 9.0. Returns the last.");
  m.def("selected", &selected, "arguments"_a, "device"_a, "check"_a, "may_leave"_a = false,
        "The kernel that the op selects; None if it leaves the call to MLX. check(kernel): what is wrong with it.");
  m.def("programs", &programs, "arguments"_a, "device"_a, "The programs that such calls may need.");
  m.def("backward", &backward, "arguments"_a, "out"_a, "lse"_a, "row_stats"_a, "out_gradient"_a, "lse_gradient"_a,
        "device"_a = "metal", "The launches of a call's gradients. out: exact_out if it is float32 and query is not.");
  m.def(
      "sinks_gradient",
      [](const mx::array& sinks, const mx::array& lse, const mx::array& row_stats, const mx::array& delta) {
        // out is not read, so lse stands in for it.
        return sinks_gradient(sinks, {lse, &lse, &row_stats}, delta, mx::to_stream({}));
      },
      "sinks"_a, "lse"_a, "row_stats"_a, "delta"_a,
      "The gradient of sinks, computed on MLX's default device from arrays that kernels wrote.");
  m.def("block_map", &block_map, "mask"_a, "device"_a = "metal", "The launch that finds a mask's block map.");
  m.def("append", &append, "stored"_a, "keys"_a, "values"_a, "offset"_a, "group_size"_a, "bits"_a, "in_place"_a,
        "The launch that appends rows to the six arrays of a quantised cache. in_place: which of them it overwrites.");
}
