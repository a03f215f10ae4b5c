// Binds the plain structs that describe a call and its kernel, and what Python's check of kernels needs.
#include "calls.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <sys/utsname.h>

#include <algorithm>
#include <future>
#include <utility>

#include "../cuda/driver.h"
#include "../dispatch/gpu_call.h"
#include "../gpu/disk_cache.h"
#include "../request/checks.h"
#include "../request/counts.h"
#include "../request/select.h"
#include "mlx/device.h"
#include "mlx/utils.h"
#include "mlx/version.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flashattn {
namespace {

mx::Dtype of_mlx(Dtype dtype) {
  return dtype == Dtype::float32 ? mx::float32 : dtype == Dtype::float16 ? mx::float16 : mx::bfloat16;
}

// The field of the call that holds the dtype of such inputs; null if their dtype is always the same.
template <typename AnyCall>
auto* dtype_field(AnyCall& call, InputDtype dtype) {
  return dtype == InputDtype::additive ? &call.bias_dtype
         : dtype == InputDtype::logits ? &call.sinks_dtype
         : dtype == InputDtype::groups ? &call.group_dtype
                                       : nullptr;
}

mx::Dtype of_input(const Call& call, InputDtype dtype) {
  if (auto* field = dtype_field(call, dtype)) return of_mlx(*field);
  return dtype == InputDtype::int32     ? mx::int32
         : dtype == InputDtype::uint32  ? mx::uint32
         : dtype == InputDtype::boolean ? mx::bool_
         : dtype == InputDtype::bytes   ? mx::uint8
                                        : mx::float32;
}

// The names of the call's optional inputs with their dtypes, and with None those of its options and "extreme_softcap".
nb::dict given(const Call& call) {
  nb::dict result;
#define FLASHATTN_GIVEN_OPTION(type, name) \
  if (call.params.name != type{}) result[#name] = nb::none();
#define FLASHATTN_GIVEN_INPUT(name, called, dtype, axes) \
  if (call.has(Input::name)) result[#name] = of_input(call, InputDtype::dtype);
  FLASHATTN_OPTIONS(FLASHATTN_GIVEN_OPTION)
  FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_GIVEN_INPUT)
  if (has_extreme_softcap(call.params)) result["extreme_softcap"] = nb::none();
  return result;
}

void make(Call* self, mx::Dtype dtype, int head_dim, std::optional<int> value_dim, int heads, int kv_heads,
          int query_len, int key_len, int batch_size, int window, const nb::dict& given, int bits, int group_size,
          bool rounds, bool is_traced) {
  Call& call = *new (self) Call{
      .dtype = dtype_of(dtype), .precision = rounds ? Precision::input : Precision::float32, .is_traced = is_traced};
  AttentionParams& p = call.params;
  p.batch_dims = 1;
  p.batch_shape[0] = batch_size;
  p.batch_size = batch_size;
  p.num_heads = heads;
  p.num_kv_heads = kv_heads;
  p.query_len = query_len;
  p.key_len = key_len;
  p.head_dim = head_dim;
  p.value_dim = value_dim.value_or(head_dim);
  p.scale = 1;
  p.bits = bits;
  p.group_size = group_size;
  p.causal = given.contains("causal") || window > 0;
  p.window = window > 0 ? window : given.contains("window") ? 1 : 0;
  p.softcap = given.contains("extreme_softcap") ? 0x1p101f : given.contains("softcap") ? 1 : 0;
  p.tree_size = given.contains("tree") ? 1 : 0;
  for (Input tensor : {Input::query, Input::key, Input::value}) call.given[index(tensor)] = true;
#define FLASHATTN_SET_INPUT(name, called, dtype, axes)               \
  if (given.contains(#name)) {                                       \
    call.given[index(Input::name)] = true;                           \
    Dtype* field = dtype_field(call, InputDtype::dtype);             \
    if (field) *field = dtype_of(nb::cast<mx::Dtype>(given[#name])); \
  }
  FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_SET_INPUT)
}

std::vector<Call> usual_next(const Call& prompt) {
  constexpr int kShort = 32, kLong = 4096;  // queries; kernels may have a program for each, see Variant::small_blocks
  Call alone = prompt;
  alone.is_traced = false;
  bool has_arrays = false;
  for (Input input : {Input::visible, Input::bias, Input::block_map, Input::tree}) {
    has_arrays |= std::exchange(alone.given[index(input)], false);
  }
  std::vector<Call> result;
  const auto add = [&](Call call, int length) {
    call.params.query_len = length;
    call.params.key_len = std::max(length, call.params.key_len);
    if (length == 1) {  // it sees all keys
      call.params.causal = false;
      call.params.window = 0;
    }
    result.push_back(call);
  };
  add(alone, 1);
  if (has_arrays || prompt.is_traced) return result;
  for (bool is_padded : {alone.has(Input::key_start), !alone.has(Input::key_start)}) {
    alone.given[index(Input::key_start)] = is_padded;
    for (int length : {kShort, kLong, 1}) add(alone, length);
  }
  return result;
}

// The device on which plan() runs nothing: the GPU that MLX uses if it is of this backend, else an unknown one.
Device device_named(const std::string& backend_name) {
  Backend backend = backend_of(backend_name);
  mx::Device gpu(mx::Device::gpu);
  bool is_here = backend != Backend::cpu && mx::is_available(gpu) && backend_of(gpu) == backend;
  if (is_here && backend == Backend::cuda) cuda::check_device(gpu.index);
  return is_here ? device_of(gpu) : Device{.backend = backend};
}

// Describes everything that may change a program's results, except the program's source text.
std::string software(mx::Device device) {
  std::string system;
  if (backend_of(device) == Backend::cuda) {
    system = cuda::describe(device.index);
  } else {
    utsname names{};
    uname(&names);
    system = std::string(names.sysname) + " " + names.release;
  }
  return std::get<std::string>(mx::device_info(device).at("device_name")) + ", " + system + ", mlx " + mx::version() +
         ", flashattn-core " FLASHATTN_VERSION;
}

// The text without its comments, which change no machine code.
std::string without_comments(const std::string& text) {
  std::string code;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', at), text.size()), comment = text.find("//", at);
    code.append(text, at, std::min(comment, end) - at);
    code += '\n';
    at = end + 1;
  }
  return code;
}

std::vector<std::string> programs(const Call& call, Variant variant, const Device& device) {
  std::vector<std::string> lines;
  for (const gpu::Launch& launch : programs_of(variant, call, device)) {
    lines.push_back(launch.specialisation + " " + gpu::sum_of(without_comments(source_text(launch, device.backend))));
  }
  return lines;
}

// The counts by the kernels' names, except those below `least`.
nb::dict at_least(uint64_t least, const Counts& counts) {
  nb::dict result;
  for (int i = 0; i < kNumKernels; ++i) {
    uint64_t count = counts[i];
    if (count >= least) result[nb::cast(name(static_cast<Kernel>(i)))] = count;
  }
  return result;
}

// Compiles programs side by side, because each takes about a second. Throws NoKernelError if one cannot be compiled.
void compile(const std::vector<gpu::Launch>& launches, int device) {
  nb::gil_scoped_release others_run;
  std::vector<std::future<CUfunction>> functions;
  for (const gpu::Launch& launch : launches) {
    functions.push_back(std::async(std::launch::async, cuda::function_of, launch, device));
  }
  try {
    for (auto& function : functions) static_cast<void>(function.get());
  } catch (const std::runtime_error& error) {
    throw NoKernelError(error.what());
  }
}

}  // namespace

void bind_calls(nb::module_& m) {
  nb::enum_<Kernel> kernels(m, "Kernel", "All kernels; their names are those of plan().");
  for (int i = 0; i < kNumKernels; ++i) {
    auto kernel = static_cast<Kernel>(i);
    kernels.value(std::string(name(kernel)).c_str(), kernel);
  }
  nb::class_<Variant>(m, "Variant", "A kernel, and what it is compiled for besides the call.")
      .def(
          "__init__",
          [](Variant* self, Kernel kernel, bool rounds, bool small_blocks) {
            new (self) Variant{kernel, rounds ? Precision::input : Precision::float32, small_blocks};
          },
          "kernel"_a, "rounds"_a = false, "small_blocks"_a = false)
      .def_ro("kernel", &Variant::kernel)
      .def_prop_ro("rounds", [](const Variant& variant) { return variant.precision == Precision::input; })
      .def_ro("small_blocks", &Variant::small_blocks);
  nb::class_<Device>(m, "Device", "What a call runs on.")
      .def(
          "__init__",
          [](Device* self, const std::string& backend, int compute_capability, int multiprocessors,
             const std::string& costs) {
            new (self) Device{.backend = backend_of(backend),
                              .compute_capability = compute_capability,
                              .multiprocessors = multiprocessors,
                              .tuned = costs.empty() ? nullptr : new Costs(read_costs(costs))};  // never freed
          },
          "backend"_a, "compute_capability"_a = 0, "multiprocessors"_a = Device{}.multiprocessors, "costs"_a = "",
          "costs: the text of a file that `mlxlm-flash tune` wrote, see csrc/call/costs.def.")
      .def_ro("compute_capability", &Device::compute_capability);
  nb::class_<Call>(m, "Call", "One attention call as plain data, see csrc/call/call.h.")
      .def("__init__", &make, "dtype"_a, "head_dim"_a, "value_dim"_a = nb::none(), "heads"_a = 1, "kv_heads"_a = 1,
           "query_len"_a = 1, "key_len"_a = 1, "batch_size"_a = 1, "window"_a = 0, "given"_a = nb::dict(), "bits"_a = 0,
           "group_size"_a = 0, "rounds"_a = false, "is_traced"_a = false)
      .def_prop_ro("dtype", [](const Call& call) { return of_mlx(call.dtype); })
      .def_prop_ro("head_dim", [](const Call& call) { return call.params.head_dim; })
      .def_prop_ro("value_dim", [](const Call& call) { return call.params.value_dim; })
      .def_prop_ro("heads", [](const Call& call) { return call.params.num_heads; })
      .def_prop_ro("kv_heads", [](const Call& call) { return call.params.num_kv_heads; })
      .def_prop_ro("query_len", [](const Call& call) { return call.params.query_len; })
      .def_prop_ro("key_len", [](const Call& call) { return call.params.key_len; })
      .def_prop_ro(
          "batch_size", [](const Call& call) { return call.params.batch_size; }, "The product of all batch axes.")
      .def_prop_ro("window", [](const Call& call) { return call.params.window; })
      .def_prop_ro("bits", [](const Call& call) { return call.params.bits; })
      .def_prop_ro("group_size", [](const Call& call) { return call.params.group_size; })
      .def_prop_ro("given", &given, "{name in inputs.def: the dtype of an optional input, or None for an option}.")
      .def_prop_ro("rounds", [](const Call& call) { return call.precision == Precision::input; })
      .def_ro("is_traced", &Call::is_traced)
      .def(
          "with_lengths",
          [](Call call, int query_len, int key_len) {
            call.params.query_len = query_len;
            call.params.key_len = key_len;
            return call;
          },
          "query_len"_a, "key_len"_a)
      .def(
          "usual_next", &usual_next,
          "The calls that usually follow this prompt: first the decode step; then prompts of other lengths, alone and\n"
          "in padded batches, and the steps after these.");
  nb::class_<Estimate>(m, "Estimate", "How long a kernel takes for a call, relative to other estimates for the call.")
      .def_ro("pairs", &Estimate::pairs)
      .def_ro("cost", &Estimate::cost)
      .def_ro("source", &Estimate::source);
  nb::class_<Choice>(m, "Choice", "The kernel that choose() chose for a call, and why.")
      .def_ro("variant", &Choice::variant)
      .def_ro("why", &Choice::why)
      .def_ro("ours", &Choice::ours)
      .def_ro("mlx", &Choice::mlx, "None if MLX has no fused kernel for the call.")
      .def_ro("is_left", &Choice::is_left);

  m.def(
      "choose",
      [](const Call& call, const Device& device, std::optional<Kernel> kernel) { return choose(call, device, kernel); },
      "call"_a, "device"_a, "kernel"_a = nb::none(),
      "The kernel for a call, whatever checks have found. Raises NoKernelError if there is none.");
  m.def(
      "plan",
      [](const Arguments& arguments, const std::string& device) {
        check_arguments(arguments);
        Call call = describe(arguments);
        Device on = device_named(device);
        return choose(call, on, arguments.kernel, failed_before(call, on));
      },
      "arguments"_a, "device"_a,
      "The kernel that the call would run on 'cpu', 'metal' or 'cuda', without those that have failed their check.\n"
      "Raises NoKernelError if there is none. Computes nothing.");
  m.def(
      "backward_variant",
      [](const Call& call, const Device& device) -> std::optional<Variant> {
        try {
          return backward_variant(call, device);
        } catch (const NoKernelError&) {
          return std::nullopt;
        }
      },
      "call"_a, "device"_a, "The variant of the first backward kernel, which stands for all; None if none covers it.");
  m.def("device_of", &device_of, "device"_a, "What MLX runs this device's streams on.");
  m.def(
      "saves_exact_out",
      [](const Call& call, const std::string& backend) { return saves_exact_out(call, backend_of(backend)); }, "call"_a,
      "backend"_a, "Whether the call keeps out, before it is rounded to 16 bits, for its gradient.");
  m.def("programs", &programs, "call"_a, "variant"_a, "device"_a,
        "A line for each program that such calls may need: its constants and its text's checksum.");
  m.def(
      "compile",
      [](const Call& call, Variant variant, mx::Device device, bool all) {
        Device on = device_of(device);
        compile(all ? programs_of(variant, call, on) : usual_programs_of(variant, call, on), device.index);
      },
      "call"_a, "variant"_a, "device"_a, "all"_a,
      "Compiles for CUDA: all programs that such calls may need, or those for contiguous arrays of these lengths.");
  m.def("software", &software, "device"_a, "The device, and the versions of software that may change results.");
  m.def("cost_of", &cost_of, "kernel"_a, "device"_a,
        "What a pair costs the kernel, relative to MLX's own fused kernel, and the number's source.");
  m.def(
      "stats", [] { return at_least(0, computed_calls); },
      "How many calls each kernel has computed, by name, since the module was loaded or reset_stats() was called.");
  m.def(
      "reset_stats", [] { std::fill(computed_calls.begin(), computed_calls.end(), 0); },
      "Sets the counts of stats() to 0.");
  m.def(
      "left_calls", [] { return at_least(1, left_calls); },
      "Calls left to MLX's own attention, by the kernel whose cost decided.");
  m.def(
      "reset_left_calls", [] { std::fill(left_calls.begin(), left_calls.end(), 0); },
      "Sets the counts of left_calls() to 0.");
  m.def("cache_folder", &gpu::cache_folder, "The user's cache folder; empty if the system defines none.");
  m.def("keep", &gpu::keep, "folder"_a, "key"_a, "text"_a,
        "Stores text under a key in a subfolder of the user's cache folder. Returns the file's path; empty if that "
        "fails.");
  m.def("read_kept", &gpu::read_kept, "folder"_a, "key"_a,
        "What keep() stored; empty if nothing was stored or the file is damaged.");
  m.def(
      "max_exact_queries", [](const std::string& backend) { return max_exact_queries(backend_of(backend)); },
      "backend"_a, "A program may be compiled for exactly this number of queries, or for fewer.");
  m.def(
      "costs_file",
      [](mx::Device device) {
        return gpu::costs_file(std::get<std::string>(mx::device_info(device).at("device_name")));
      },
      "device"_a,
      "The file from which choose() reads the costs of kernels on this GPU; empty if the system defines none.");
  m.attr("checked_lengths") = std::vector<std::pair<int, int>>(std::begin(kChecked), std::end(kChecked));
  m.attr("checked_sharing") = kCheckedSharing;
}

}  // namespace flashattn
