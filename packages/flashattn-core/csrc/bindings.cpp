// Names for Python; no logic. flashattn_core/attention.py says what the arguments mean.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "attention.h"
#include "counts.h"
#include "cpu/attention.h"
#include "cpu/roofline.h"
#include "metal/inspect.h"
#include "metal/sources.h"
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
#ifdef __linux__
  std::string name = "mlx[cpu]";  // libmlx itself is another distribution there, and only the extra brings it
#else
  std::string name = "mlx";
#endif
  if (found != built) {
    throw nb::import_error(("flashattn_core was built for mlx " + built + " and found mlx " + found +
                            ". Install the matching one: pip install '" + name + "==" + built + "'")
                               .c_str());
  }
}

}  // namespace

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");
  require_matching_mlx();

  nb::exception<NoKernelError>(m, "NoKernelError", PyExc_ValueError).attr("__doc__") =
      "No kernel covers the call; the text is the reason that plan() gives.";

  nb::class_<Arguments>(m, "Arguments", "One call's arguments: flash_attention() says what they mean.")
      .def(
          "__init__",
          [](Arguments* self, const mx::array& query, const mx::array& key, const mx::array& value,
             std::optional<float> scale, float softcap, bool causal, int window, const OptionalArray& key_start,
             const OptionalArray& key_stop, const OptionalArray& tree, const OptionalArray& visible,
             const OptionalArray& bias, const OptionalArray& sinks, const OptionalArray& alibi_slopes,
             const OptionalArray& key_scales, const OptionalArray& key_biases, const OptionalArray& value_scales,
             const OptionalArray& value_biases, int bits, int group_size, std::string kernel) {
            new (self) Arguments{query,
                                 key,
                                 value,
                                 {key_start, key_stop, tree, visible, bias, sinks, alibi_slopes, key_scales, key_biases,
                                  value_scales, value_biases},
                                 {scale, softcap, causal, window, std::move(kernel), bits, group_size}};
          },
          "query"_a, "key"_a, "value"_a, nb::kw_only(), "scale"_a = nb::none(), "softcap"_a = 0.0f, "causal"_a = false,
          "window"_a = 0, "key_start"_a = nb::none(), "key_stop"_a = nb::none(), "tree"_a = nb::none(),
          "visible"_a = nb::none(), "bias"_a = nb::none(), "sinks"_a = nb::none(), "alibi_slopes"_a = nb::none(),
          "key_scales"_a = nb::none(), "key_biases"_a = nb::none(), "value_scales"_a = nb::none(),
          "value_biases"_a = nb::none(), "bits"_a = 0, "group_size"_a = 0, "kernel"_a = "auto");

  m.def(
      "attention",
      [](const Arguments& arguments, mx::StreamOrDevice stream) {
        auto outputs = attention(arguments, stream);
        return std::pair(outputs[0], outputs[1]);
      },
      "arguments"_a, "stream"_a.none(), "The op: returns (out, lse), both lazy.");

  m.def(
      "plan",
      [](const Arguments& arguments, bool metal) {
        Choice choice = plan(arguments, metal ? Backend::metal : Backend::cpu);
        std::optional<std::string> chosen;
        if (choice.kernel) {
          chosen = name(*choice.kernel);
        }
        return std::pair(chosen, choice.reason);
      },
      "arguments"_a, "metal"_a, "(kernel or None, reason); nothing is computed.");

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
  m.def("peak_flops", &cpu::peak_flops, nb::call_guard<nb::gil_scoped_release>(),
        "Floating-point operations per second that the CPU backend's threads reach with fused multiply-adds in\n"
        "registers, one of which counts two. Takes 30 ms.");
  m.def("read_bandwidth", &cpu::read_bandwidth, nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second that the CPU backend's threads read from a buffer larger than the caches (256 MB).\n"
        "Takes 0.2 s.");
  m.def(
      "is_tracing", [](const mx::array& a) { return a.is_tracer(); },
      "Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing the array.");
  m.def(
      "array_id", [](const mx::array& a) { return a.id(); },
      "array_id(array) -> int\n\n"
      "MLX's own identity of an array while it lives. A Python object keeps its when the array is evaluated, and gets\n"
      "another when an operator writes to it in place.");

  // For tests.
  m.def("metal_sources", &metal::sources, "The Metal kernels' texts by the name of their file; for tests.");
  m.def("metal_launches", &metal::inspect_forward, "arguments"_a,
        "What a call would run on Metal, on any machine; for tests.");
  m.def("metal_backward_launches", &metal::inspect_backward, "arguments"_a, "out"_a, "lse"_a, "out_gradient"_a,
        "lse_gradient"_a.none(), "What a call's gradients would run on Metal; for tests.");
}
