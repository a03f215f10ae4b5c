// Names for Python, and the check that MLX is the one that this module was built for. flashattn_core/attention.py says
// what the arguments mean.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <string>

#include "../cpu/forward.h"
#include "../cpu/kept_memory.h"
#include "../cpu/roofline.h"
#include "../cuda/driver.h"
#include "../cuda/encode.h"
#include "../gpu/disk_cache.h"
#include "../op/counts.h"
#include "../op/forward.h"
#include "../op/gpu_call.h"
#include "../op/prepare.h"
#include "../op/trust.h"
#include "interrupt.h"
#include "mlx/device.h"
#include "mlx/version.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;
using namespace flashattn;

namespace {

using OptionalArray = std::optional<mx::array>;

// libmlx's C++ ABI changes between patch releases, and a mismatch can corrupt memory instead of failing.
void require_matching_mlx() {
  std::string built = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
                      std::to_string(MLX_VERSION_PATCH);
  std::string found = mx::version();
  std::string install = "pip install 'mlx==" + built + "'";
#ifdef __linux__  // where libmlx is a distribution of its own, and only an extra brings it
  install = "pip install 'mlx[cpu]==" + built + "', or [cuda12] or [cuda13] for an NVIDIA GPU";
#endif
  if (found != built) {
    throw nb::import_error(("flashattn_core was built for mlx " + built + " and found mlx " + found +
                            ". Install the matching one: " + install)
                               .c_str());
  }
}

}  // namespace

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");
  require_matching_mlx();

  nb::exception<NoKernelError>(m, "NoKernelError", PyExc_ValueError).attr("__doc__") =
      "No kernel covers the call; the text is the reason that plan() gives.";

// One keyword argument for each optional input and each option of inputs.def.
#define FLASHATTN_INPUT_PARAMETER(name, ...) const OptionalArray &name,
#define FLASHATTN_OPTION_PARAMETER(type, name) type name,
#define FLASHATTN_INPUT_VALUE(name, ...) name,
#define FLASHATTN_SET_OPTION(type, name) self->options.name = name;
#define FLASHATTN_INPUT_KEYWORD(name, ...) nb::arg(#name) = nb::none(),
#define FLASHATTN_OPTION_KEYWORD(type, name) nb::arg(#name) = type{},
  nb::class_<Arguments>(m, "Arguments", "One call's arguments: csrc/call/inputs.def lists them.")
      .def(
          "__init__",
          [](Arguments* self, const mx::array& query, const mx::array& key, const mx::array& value,
             FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_INPUT_PARAMETER) FLASHATTN_OPTIONS(FLASHATTN_OPTION_PARAMETER)
                 std::optional<float>
                     scale,
             std::string kernel) {
            new (self) Arguments{{query, key, value, FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_INPUT_VALUE)}, {}};
            FLASHATTN_OPTIONS(FLASHATTN_SET_OPTION)
            self->options.scale = scale;
            self->options.kernel = std::move(kernel);
          },
          "query"_a, "key"_a, "value"_a, nb::kw_only(),
          FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_INPUT_KEYWORD) FLASHATTN_OPTIONS(FLASHATTN_OPTION_KEYWORD) "scale"_a =
              nb::none(),
          "kernel"_a = "auto")
      .def(
          "kind",
          [](const Arguments& arguments) {
            Inputs inputs(arguments);
            const mx::array &query = inputs.query(), &key = inputs.key();
            const Options& options = arguments.options;
            nb::dict given;
#define FLASHATTN_GIVEN_OPTION(type, name) \
  if (options.name != type{}) given[#name] = nb::none();
#define FLASHATTN_GIVEN_INPUT(name, ...) \
  if (inputs[Input::name]) given[#name] = inputs[Input::name]->dtype();
            FLASHATTN_OPTIONS(FLASHATTN_GIVEN_OPTION)
            FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_GIVEN_INPUT)
            return nb::make_tuple(query.dtype(), query.shape(kColumn), columns_of(inputs.value(), options),
                                  query.shape(kHead) / key.shape(kHead), query.shape(kRow), given, options.bits,
                                  options.group_size);
          },
          "dtype, head_dim, value_dim, query heads of a key/value head, queries, and what is given: the dtypes of\n"
          "inputs and None for options, by the names of inputs.def; bits and group_size.")
      .def(
          "sizes",
          [](const Arguments& arguments) {
            Inputs inputs(arguments);
            const mx::array &query = inputs.query(), &key = inputs.key();
            int64_t of_one = int64_t{query.shape(kHead)} * query.shape(kRow) * query.shape(kColumn);
            return nb::make_tuple(of_one == 0 ? 0 : query.size() / of_one, query.shape(kHead), key.shape(kHead),
                                  key.shape(kRow), arguments.options.window);
          },
          "Batch elements, query heads, key/value heads, keys, and those that a query sees; 0: all before it.");

  m.def(
      "attention",
      [](const Arguments& arguments, bool return_lse,
         mx::StreamOrDevice stream) -> std::variant<mx::array, std::pair<mx::array, mx::array>> {
        auto outputs = attention(arguments, return_lse, stream);
        if (return_lse) {
          return std::pair(outputs[0], outputs[1]);
        }
        return outputs[0];
      },
      "arguments"_a, "return_lse"_a, "stream"_a.none(), "The op: returns out, or (out, lse), lazy.");

  m.def(
      "plan",
      [](const Arguments& arguments, const std::string& device) {
        Choice choice = plan(arguments, backend_of(device));
        std::optional<std::string> chosen;
        if (choice.kernel) {
          chosen = name(*choice.kernel);
        }
        return std::pair(chosen, choice.reason);
      },
      "arguments"_a, "device"_a, "(kernel or None, reason); nothing is computed.");
  m.def(
      "backend_of", [](const mx::Device& device) { return std::string(name(backend_of(device))); }, "device"_a,
      "'cpu', 'metal' or 'cuda': what runs on a device of the MLX that is installed.");
  m.def(
      "max_head_dim",
      [](const std::string& device, bool gradient, bool quantised) {
        return max_head_dim(backend_of(device), gradient ? Pass::backward : Pass::forward, quantised);
      },
      "device"_a, "gradient"_a, "quantised"_a, "The largest head_dim that some kernel takes; 0 where none does.");

  m.def(
      "kernels",
      [](const std::string& device) {
        std::vector<std::string> names;
        for (int i = 0; i < kNumKernels; ++i) {
          auto kernel = static_cast<Kernel>(i);
          if (backend_of(kernel) != backend_of(device) || pass_of(kernel) != Pass::forward) continue;
          for (int tiling = 0; tiling < tilings(kernel); ++tiling) names.push_back(name(Tiled{kernel, tiling}));
        }
        return names;
      },
      "device"_a, "The forward kernels' names, each followed by those of its other tilings.");
  m.def(
      "stats",
      [] {
        nb::dict result;
        auto counts = calls();
        for (int i = 0; i < kNumKernels; ++i) {
          result[std::string(name(static_cast<Kernel>(i))).c_str()] = counts[i];
        }
        return result;
      },
      "Evaluated calls of each kernel, by its name, since the module was loaded or reset_stats() was called.");
  m.def("reset_stats", &reset_calls, "Sets the counts of stats() to 0.");
  m.def("describe_cpu", &cpu::describe, "The CPU backend in words.");
  m.def(
      "describe_cuda",
      [] {
        mx::Device first(mx::Device::gpu);
        cuda::check_device(first.index);
        return std::get<std::string>(mx::device_info(first).at("device_name")) + ", " + cuda::describe(first.index);
      },
      "The GPU, its architecture and its software in words. Raises NoKernelError where something is missing.");
  m.def("peak_flops", &cpu::peak_flops, nb::call_guard<nb::gil_scoped_release>(),
        "Floating-point operations per second that the CPU backend's threads reach with fused multiply-adds in\n"
        "registers, one of which counts two. Takes 30 ms.");
  m.def("read_bandwidth", &cpu::read_bandwidth, nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second that the CPU backend's threads read from a buffer larger than the caches (256 MB).\n"
        "Takes 0.2 s.");
  m.def(
      "release_scratch",
      [] {
        cuda::release_scratch();
        return cpu::release_kept_memory();
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Frees the working memory that the CPU backend's threads, and this thread's streams on CUDA, keep for their "
      "next\n"
      "call, after the calls under way. Returns how many bytes the CPU's were: the most that calls since the last\n"
      "release needed at once. They are no part of mx.get_peak_memory(); CUDA's are.");
  m.def(
      "is_tracing", [](const mx::array& a) { return a.is_tracer(); },
      "Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing the array.");
  m.def(
      "likeness",
      [](const mx::array& query, const mx::array& key, const mx::array& value, const mx::array* sinks) -> uint64_t {
        if (query.is_tracer() || key.is_tracer() || value.is_tracer() || (sinks && sinks->is_tracer())) return 0;
        uint64_t sum = 0xcbf29ce484222325;  // FNV-1a
        const auto add = [&](int number) { sum = (sum ^ static_cast<uint64_t>(number)) * 0x100000001b3; };
        for (const mx::array* array : {&query, &key, &value}) {
          add(static_cast<int>(array->dtype().val()));
          add(static_cast<int>(array->ndim()));
        }
        for (int size : query.shape()) add(size);
        if (key.ndim() >= 3) add(key.shape(kHead));
        if (key.ndim() >= 3) add(static_cast<int>(std::bit_width(static_cast<unsigned>(key.shape(kRow)))));
        if (value.ndim() >= 1) add(value.shape(kColumn));
        add(sinks ? static_cast<int>(sinks->dtype().val()) : -1);
        add(mx::default_device() == mx::Device::cpu ? -1 : mx::default_device().index);
        return sum | 1;
      },
      "query"_a, "key"_a, "value"_a, "sinks"_a.none(),
      "A number that calls on the default device have in common whose queries have one shape, whose arrays have the\n"
      "same dtypes, and whose keys have as many heads and, in powers of two, are as many. 0 of a call that is traced.");
  m.def(
      "array_id", [](const mx::array& a) { return a.id(); },
      "array_id(array) -> int\n\n"
      "MLX's own identity of an array while it lives. A Python object keeps its when the array is evaluated, and gets\n"
      "another when an operator writes to it in place.");

  // These modules import this one, and are not imported before a GPU is asked for anything.
  set_check([](const Arguments& arguments, Tiled kernel, mx::Stream stream) {
    nb::gil_scoped_acquire python;
    nb::object check = nb::module_::import_("flashattn_core.check").attr("of_call");
    try {
      return nb::cast<std::string>(check(arguments, name(kernel), stream));
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_MemoryError)) throw;
      throw NoKernelError(error.what());  // for this call; the next one is checked again
    }
  });
  set_preference([](const Arguments& arguments, const mx::Device& device, const std::string& usual) {
    nb::gil_scoped_acquire python;
    nb::object preferred = nb::module_::import_("flashattn_core.tuned").attr("preferred");
    return nb::cast<std::string>(preferred(arguments, device, usual));
  });
  m.attr("few_queries") = kFew;
  m.attr("checked_lengths") = std::vector<std::pair<int, int>>(std::begin(kChecked), std::end(kChecked));
  m.def("cache_folder", &gpu::cache_folder, "The user's folder of caches; empty where the system names none.");
  m.def("keep", &gpu::keep, "folder"_a, "key"_a, "text"_a,
        "Writes a file to the user's folder of caches. Returns its path; empty if it cannot be written.");

  m.def("watch_interrupts", &watch_interrupts, "SIGINT ends the long calls that the main thread waits for.");
  m.def("stop_watching_interrupts", &stop_watching_interrupts, "It no longer does.");
  m.def("forget_interrupt", &forget_interrupt, "The main thread goes on: what it has begun is not waited for.");
}
