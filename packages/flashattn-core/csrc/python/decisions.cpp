// Python bindings for flashattn_core/decide.py, which chooses the kernels of GPU calls.
#include "decisions.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/utsname.h>

#include <future>
#include <memory>

#include "../cuda/driver.h"
#include "../dispatch/gpu_call.h"
#include "../gpu/disk_cache.h"
#include "../request/arguments.h"
#include "../request/checks.h"
#include "../request/decision.h"
#include "mlx/device.h"
#include "mlx/utils.h"
#include "mlx/version.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flashattn {
namespace {

CallShape shape_of(const Arguments& arguments, Backend backend) {
  return call_shape(Inputs(arguments), arguments.options, backend, arguments.precision);
}

std::vector<std::pair<std::string, bool>> candidates_of(const Arguments& arguments, const std::string& backend_name) {
  check_arguments(arguments);
  Backend backend = backend_of(backend_name);
  CallShape shape = shape_of(arguments, backend);
  Variant chosen = chosen_variant(choose(backend, shape, arguments.kernel));  // throws if no kernel covers the call
  if (arguments.kernel != "auto") return {{name(chosen), false}};
  std::vector<std::pair<std::string, bool>> names;
  for (const Candidate& each : candidates(backend, shape)) names.emplace_back(name(each.variant), each.is_timed);
  return names;
}

// Returns the name of the first backward kernel, which stands for all of them. Returns nothing if they cannot run the
// call.
std::optional<std::string> backward_kernel(const Arguments& arguments, const std::string& backend_name) try {
  Backend backend = backend_of(backend_name);
  check_backward(backend, shape_of(arguments, backend));
  return std::string(name(backward_kernels(backend).front()));
} catch (const NoKernelError&) {
  return std::nullopt;
}

Variant variant_of(const std::string& kernel, const Arguments& arguments, Backend backend) {
  CallShape shape = shape_of(arguments, backend);
  Variant gradient = backward_variant(backend, shape);
  return kernel == name(gradient) ? gradient : chosen_variant(choose(backend, shape, kernel));
}

// Calls function(variant, inputs, backend) for the kernel of this name.
template <typename F>
auto with_variant(const Arguments& arguments, const std::string& kernel, const std::string& backend_name, F function) {
  Backend backend = backend_of(backend_name);
  std::vector<mx::array> arrays = primitive_inputs(arguments, backend, mx::to_stream({}));
  return function(variant_of(kernel, arguments, backend), Inputs(arrays, present_in(arguments)), backend);
}

std::vector<std::string> pipelines(const Arguments& arguments, const std::string& kernel, const std::string& backend) {
  return with_variant(arguments, kernel, backend, [&](Variant variant, const Inputs& inputs, Backend backend) {
    std::vector<std::string> lines;
    bool has_exact_out = saves_exact_out(arguments, backend);
    for (const gpu::Launch& launch : pipelines_of(variant, inputs, arguments.options, has_exact_out)) {
      lines.push_back(launch.specialisation + " " + gpu::sum_of(source_text(launch, backend)));
    }
    return lines;
  });
}

void compile(const Arguments& arguments, const std::string& kernel, mx::Device device, bool all) {
  with_variant(arguments, kernel, "cuda", [&](Variant variant, const Inputs& inputs, Backend) {
    nb::gil_scoped_release others_run;
    bool has_exact_out = saves_exact_out(arguments, Backend::cuda);
    if (!all) return prepare_for_cuda(variant, inputs, arguments.options, has_exact_out, device.index);
    // Compiles all pipelines at the same time, because each takes about a second. Ignores errors. check.py compiles
    // again and reports them.
    std::vector<std::future<CUfunction>> functions;
    for (const gpu::Launch& launch : pipelines_of(variant, inputs, arguments.options, has_exact_out)) {
      functions.push_back(std::async(std::launch::async, cuda::function_of, launch, device.index));
    }
  });
}

// Describes everything that may change a pipeline's results, except the pipeline's source text.
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

void settle_kind(const Arguments& arguments, mx::Device device, const std::optional<std::string>& kernel,
                 const std::vector<std::string>& failed, const std::string& wrong,
                 std::optional<std::pair<double, double>> left, const std::string& words) {
  Backend backend = backend_of(device);
  auto settled = std::make_unique<Settled>();
  if (kernel) settled->variant = variant_of(*kernel, arguments, backend);
  for (const std::string& each : failed) {
    settled->failed = with(settled->failed, variant_of(each, arguments, backend).kernel);
  }
  settled->wrong = wrong;
  settled->left = left;
  settled->words = words;
  settle(CallKey(Inputs(arguments), arguments, device), std::move(settled));
}

}  // namespace

void bind_decisions(nb::module_& m) {
  m.def("candidates", &candidates_of, "arguments"_a, "backend"_a,
        "[(kernel that can run the call, whether to time it)]. Raises NoKernelError if there is none.");
  m.def("backward_kernel", &backward_kernel, "arguments"_a, "backend"_a,
        "The name that stands for all kernels of the gradient; None if they do not cover the call.");
  m.def(
      "saves_exact_out",
      [](const Arguments& arguments, const std::string& backend_name) {
        return saves_exact_out(arguments, backend_of(backend_name));
      },
      "arguments"_a, "backend"_a, "Whether the call keeps out, before it is rounded to 16 bits, for its gradient.");
  m.def("pipelines", &pipelines, "arguments"_a, "kernel"_a, "backend"_a,
        "A line for each pipeline that the kernel needs in calls of this kind: its constants and its text's checksum.");
  m.def("compile", &compile, "arguments"_a, "kernel"_a, "device"_a, "all"_a,
        "Compiles for CUDA: all pipelines of the kernel, or those of this call. Only the latter raises NoKernelError.");
  m.def("software", &software, "device"_a, "The device, and the versions of software that may change results.");
  m.def("settle", &settle_kind, "arguments"_a, "device"_a, "kernel"_a.none(), "failed"_a, "wrong"_a, "left"_a.none(),
        "words"_a,
        "Stores the decision for calls of this kind: they run the kernel, or raise `wrong`. left: seconds per call of\n"
        "(MLX's own attention, the kernel) if MLX's own attention should run instead.");
  m.def("left_calls", &left_calls,
        "Calls left to MLX's own attention: [(kind in words, MLX's seconds per call, the kernel's, how many calls)].");
  m.def("reset_left_calls", &reset_left_calls, "Sets the counts of left_calls() to 0.");
  m.def("cache_folder", &gpu::cache_folder, "The user's cache folder; empty if the system defines none.");
  m.def("keep", &gpu::keep, "folder"_a, "key"_a, "text"_a,
        "Stores text under a key in a subfolder of the user's cache folder. Returns the file's path; empty if that "
        "fails.");
  m.def("read_kept", &gpu::read_kept, "folder"_a, "key"_a,
        "What keep() stored; empty if nothing was stored or the file is damaged.");
  m.attr("few_queries") = kFew;
  m.attr("checked_lengths") = std::vector<std::pair<int, int>>(std::begin(kChecked), std::end(kChecked));
  m.attr("checked_sharing") = kCheckedSharing;
  m.attr("max_cuda_decode_len") = kMaxCudaDecodeLen;
}

}  // namespace flashattn
