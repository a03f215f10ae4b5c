// The Python bindings. Importing the module fails if the installed MLX is not the version that the module was built
// for. flashattn_core/attention.py documents the arguments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "../cpu/forward.h"
#include "../cpu/kept_memory.h"
#include "../cpu/roofline.h"
#include "../cpu/threads.h"
#include "../cuda/driver.h"
#include "../gpu/encode.h"
#include "../op/append.h"
#include "../op/block_map.h"
#include "../op/forward.h"
#include "../op/tree.h"
#include "../request/checks.h"
#include "../request/select.h"
#include "calls.h"
#include "mlx/device.h"
#include "mlx/ops.h"
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
#ifdef __linux__  // on Linux, mlx without an extra does not install libmlx
  install = "pip install 'mlx[cpu]==" + built + "', or [cuda12] or [cuda13] for an NVIDIA GPU";
#endif
  if (found != built) {
    throw nb::import_error(("flashattn_core was built for mlx " + built + ", but found mlx " + found +
                            ". Install the matching mlx: " + install)
                               .c_str());
  }
}

nb::object as_python(const Arrays& outputs, bool with_lse) {
  if (with_lse) return nb::make_tuple(outputs[0], outputs[1]);
  return nb::cast(outputs[0]);
}

// Checks the call, environment variables and the GPU, because a caller cannot catch errors during evaluation. Returns
// the backend that runs the call.
Backend checked(const Arguments& arguments, const mx::Stream& stream) {
  Backend backend = backend_of(stream.device);
  check_arguments(arguments);
  if (backend == Backend::cpu) cpu::initialise();
  if (backend == Backend::cuda) cuda::check_device(stream.device.index);
  return backend;
}

// Runs the op, or returns mlx(query, key, value, scale=, mask=mlx_mask, sinks=) if MLX's own attention should compute
// the call. mlx: a Python function, or None.
nb::object attend(const Arguments& arguments, bool with_lse, mx::StreamOrDevice where, nb::handle mlx,
                  nb::handle mlx_mask) {
  mx::Stream stream = mx::to_stream(where);
  checked(arguments, stream);
  Call call = describe(arguments);
  const auto check = [&](Variant variant) {
    nb::object wrong_with = nb::module_::import_("flashattn_core.check").attr("wrong_with");
    return nb::cast<std::string>(wrong_with(call, variant, stream));
  };
  std::optional<Selection> selection = select(arguments, call, device_of(stream.device), !mlx.is_none(), check);
  if (selection) return as_python(attention(arguments, *selection, with_lse, stream), with_lse);
  const auto given = [&](Input input) { return nb::cast(*arguments.inputs[index(input)]); };
  nb::object sinks = arguments.inputs[index(Input::sinks)] ? given(Input::sinks) : nb::none();
  return mlx(given(Input::query), given(Input::key), given(Input::value), "scale"_a = arguments.options.scale,
             "mask"_a = mlx_mask, "sinks"_a = sinks);
}

// The array, or null if the object is not an mx.array.
mx::array* as_array(nb::handle given) {
  return nb::isinstance<mx::array>(given) ? nb::inst_ptr<mx::array>(given) : nullptr;
}

// Words, scales and biases, if the object is a tuple or list of three arrays; else nulls.
std::array<mx::array*, 3> as_quantised(nb::handle given) {
  bool is_tuple = PyTuple_CheckExact(given.ptr());
  if ((!is_tuple && !PyList_CheckExact(given.ptr())) || PyObject_Size(given.ptr()) != 3) return {};
  std::array<mx::array*, 3> arrays;
  for (int i = 0; i < 3; ++i) {
    arrays[i] = as_array(is_tuple ? PyTuple_GetItem(given.ptr(), i) : PyList_GetItem(given.ptr(), i));
    if (!arrays[i]) return {};
  }
  return arrays;
}

// A mask, as the arguments of a call without query, key and value.
struct LoweredMask {
  Arguments arguments;
};

// Returns the mask as arguments, or null if it needs a conversion.
const Arguments* as_arguments(nb::handle mask) {
  static const Arguments none, causal = {{}, Options{.causal = true}};
  if (mask.is_none()) return &none;
  if (nb::isinstance<LoweredMask>(mask)) return &nb::inst_ptr<LoweredMask>(mask)->arguments;
  bool is_causal = nb::isinstance<nb::str>(mask) && PyUnicode_CompareWithASCIIString(mask.ptr(), "causal") == 0;
  return is_causal ? &causal : nullptr;
}

// Puts keys or values into the arguments: an array of this dtype or, if they are quantised, a tuple or list of words,
// scales and biases. Returns false for anything else.
bool add_stored(Arguments& arguments, nb::handle given, mx::Dtype dtype, Input words, Input scales, Input biases) {
  const auto add = [&](Input input, const mx::array* array) {
    if (array) arguments.inputs[index(input)] = *array;
    return array != nullptr;
  };
  if (arguments.options.bits == 0)
    return add(words, as_array(given)) && arguments.inputs[index(words)]->dtype() == dtype;
  auto arrays = as_quantised(given);
  return add(words, arrays[0]) && add(scales, arrays[1]) && add(biases, arrays[2]) && arrays[1]->dtype() == dtype;
}

nb::object quick(nb::handle query, nb::handle key, nb::handle value, nb::handle scale, nb::handle mask,
                 nb::handle sinks, bool rounds, nb::handle mlx, nb::handle mlx_mask, int32_t group_size, int32_t bits) {
  const mx::array *q = as_array(query), *s = as_array(sinks);
  bool is_plain = q && (s || sinks.is_none()) && (scale.is_none() || PyFloat_CheckExact(scale.ptr()));
  if (!is_plain || (!mlx.is_none() && (q->ndim() != 4 || scale.is_none()))) return nb::none();
  const Arguments* masked = as_arguments(mask);
  if (!masked) return nb::none();
  Arguments arguments = *masked;
  arguments.inputs[index(Input::query)] = *q;
  arguments.options.group_size = group_size;
  arguments.options.bits = bits;
  if (!add_stored(arguments, key, q->dtype(), Input::key, Input::key_scales, Input::key_biases) ||
      !add_stored(arguments, value, q->dtype(), Input::value, Input::value_scales, Input::value_biases)) {
    return nb::none();
  }
  if (s) arguments.inputs[index(Input::sinks)] = *s;
  if (!mlx.is_none() && is_traced(arguments)) {  // the call may be differentiated, and MLX has a gradient
    int most = max_head_dim(backend_of(mx::default_device()), Pass::backward, bits != 0);
    if (std::max(q->shape(-1), arguments.inputs[index(Input::value)]->shape(-1)) > most) return nb::none();
  }
  if (!scale.is_none()) arguments.options.scale = static_cast<float>(PyFloat_AsDouble(scale.ptr()));
  if (!std::isfinite(arguments.options.scale.value_or(1))) return nb::none();  // flash_attention() raises the error
  arguments.options.precision = rounds ? Precision::input : Precision::float32;
  return attend(arguments, false, {}, mlx, mlx_mask);
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
#define FLASHATTN_SET_MASK(name, ...) self->arguments.inputs[index(Input::name)] = name;
#define FLASHATTN_SET_OPTION(type, name) self->options.name = name;
#define FLASHATTN_INPUT_KEYWORD(name, ...) nb::arg(#name) = nb::none(),
#define FLASHATTN_OPTION_KEYWORD(type, name) nb::arg(#name) = type{},
  nb::class_<Arguments>(m, "Arguments", "The arguments of one call; csrc/call/inputs.def lists the optional ones.")
      .def(
          "__init__",
          [](Arguments* self, const mx::array& query, const mx::array& key, const mx::array& value,
             FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_INPUT_PARAMETER) FLASHATTN_OPTIONS(FLASHATTN_OPTION_PARAMETER)
                 std::optional<float>
                     scale,
             const std::string& kernel, bool rounds) {
            new (self) Arguments{{query, key, value, FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_INPUT_VALUE)}};
            FLASHATTN_OPTIONS(FLASHATTN_SET_OPTION)
            self->options.scale = scale;
            self->kernel = kernel_named(kernel);
            self->options.precision = rounds ? Precision::input : Precision::float32;
          },
          "query"_a, "key"_a, "value"_a, nb::kw_only(),
          FLASHATTN_OPTIONAL_INPUTS(FLASHATTN_INPUT_KEYWORD) FLASHATTN_OPTIONS(FLASHATTN_OPTION_KEYWORD) "scale"_a =
              nb::none(),
          "kernel"_a = "auto", "rounds"_a = false)
      .def_prop_ro("call", [](const Arguments& arguments) { return describe(arguments); }, "The call as plain data.");

  nb::class_<LoweredMask>(m, "LoweredMask", "A mask as quick() takes it, made from what masks.lower() returns.")
      .def(
          "__init__",
          [](LoweredMask* self, FLASHATTN_MASKS(FLASHATTN_INPUT_PARAMETER) bool causal, int32_t window) {
            new (self) LoweredMask{};
            FLASHATTN_MASKS(FLASHATTN_SET_MASK)
            self->arguments.options.causal = causal;
            self->arguments.options.window = window;
          },
          nb::kw_only(), FLASHATTN_MASKS(FLASHATTN_INPUT_KEYWORD) "causal"_a = false, "window"_a = 0);

  m.def(
      "attention", &attend, "arguments"_a, "return_lse"_a, "stream"_a.none(), "mlx"_a = nb::none(),
      "mlx_mask"_a = nb::none(),
      "The op: returns out, or (out, lse), lazy. If MLX's own attention should compute the call, and `mlx` is a\n"
      "function, returns mlx(query, key, value, scale=, mask=mlx_mask, sinks=); the call is counted in left_calls().");
  m.def(
      "unchecked_attention",
      [](const Arguments& arguments, Variant variant, bool return_lse, mx::StreamOrDevice where,
         bool return_exact_out) -> nb::object {
        mx::Stream stream = mx::to_stream(where);
        Backend backend = checked(arguments, stream);
        bool is_forward = pass_of(variant.kernel) == Pass::forward && backend == backend_of(variant.kernel);
        Selection selection = {.kernel = is_forward ? std::optional(variant.kernel) : std::nullopt,
                               .is_counted = false,
                               .small_blocks = variant.small_blocks};
        Arrays outputs = attention(arguments, selection, return_lse, stream, return_exact_out);
        if (return_exact_out) return nb::make_tuple(outputs[0], outputs[1], outputs[3]);
        return as_python(outputs, return_lse);
      },
      "arguments"_a, "variant"_a, "return_lse"_a, "stream"_a.none(), "return_exact_out"_a = false,
      "Like attention(), with this variant if it is one of the stream's forward kernels, whatever its check has "
      "found.\n"
      "stats() does not count the call. return_exact_out: return (out, lse, out before it is rounded to 16 bits).");
  m.def("quick", &quick, "query"_a.none(), "key"_a.none(), "value"_a.none(), "scale"_a.none(), "mask"_a.none(),
        "sinks"_a.none(), "rounds"_a, "mlx"_a = nb::none(), "mlx_mask"_a = nb::none(), "group_size"_a = 0, "bits"_a = 0,
        "attention() on the default stream for arguments that need no conversion. None: they need one, or `mlx` is "
        "given\n"
        "and MLX's own attention refuses them: no scale, and arrays that are not 4-D.");

  m.def(
      "backend_of", [](const mx::Device& device) { return std::string(name(backend_of(device))); }, "device"_a,
      "'cpu', 'metal' or 'cuda': the backend that the installed MLX has for a device.");
  m.def(
      "max_head_dim",
      [](const std::string& device, bool gradient, bool quantised) {
        return max_head_dim(backend_of(device), gradient ? Pass::backward : Pass::forward, quantised);
      },
      "device"_a, "gradient"_a, "quantised"_a, "The largest head_dim that some kernel supports; 0 if none does.");

  m.def("describe_cpu", &cpu::describe, "Describes the CPU backend in words: its instruction set and threads.");
  m.def(
      "describe_cuda",
      [] {
        mx::Device first(mx::Device::gpu);
        cuda::check_device(first.index);
        return std::get<std::string>(mx::device_info(first).at("device_name")) + ", " + cuda::describe(first.index);
      },
      "Describes the first GPU, its architecture and its software. Raises NoKernelError if something is missing.");
  m.def("peak_flops", &cpu::peak_flops, nb::call_guard<nb::gil_scoped_release>(),
        "Floating-point operations per second that the CPU backend's threads reach with fused multiply-adds in\n"
        "registers; a multiply-add counts as two. The measurement takes 30 ms.");
  m.def("read_bandwidth", &cpu::read_bandwidth, nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second that the CPU backend's threads read from a buffer larger than the caches (256 MB).\n"
        "The measurement takes 0.2 s.");
  m.def(
      "release_scratch",
      [] {
        cuda::release_scratch();
        return cpu::release_kept_memory();
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Waits for running calls, then frees the working memory that the CPU backend's threads, and this thread's CUDA\n"
      "streams, keep for their next call. Returns how many bytes the CPU's threads kept: the most that calls since\n"
      "the last release needed at once. mx.get_peak_memory() does not include them; it includes CUDA's.");
  m.def(
      "is_tracing", [](const mx::array& a) { return a.is_tracer(); },
      "Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing the array.");
  m.def(
      "array_id", [](const mx::array& a) { return a.id(); },
      "array_id(array) -> int\n\n"
      "MLX's own id of an array, unique while the array lives. Evaluation keeps the id; an operator that writes to\n"
      "the Python object in place changes it.");
  m.def(
      "is_unevaluated", [](const mx::array& a) { return a.status() == mx::array::Status::unscheduled; }, "a"_a,
      "Whether nobody has evaluated the array. Only then nobody can have written to its memory.");

  m.def(
      "block_map",
      [](const Arguments& arguments) {
        mx::Stream stream = mx::to_stream({});
        Arrays inputs = primitive_inputs(arguments, backend_of(stream.device), stream);
        return block_map_of(arguments, Inputs(inputs, present_in(arguments)), stream);
      },
      "arguments"_a, "The block map of the array masks, even if kernels do not use it: see csrc/call/block_map.h.");
  m.def("keep_block_maps", &keep_block_maps, "mask"_a,
        "Lets the calls of one evaluation share this mask's block maps, until forget_block_maps() has been called as\n"
        "often as this. Returns the mask's array_id(), by which it is forgotten.");
  m.def("forget_block_maps", &forget_block_maps, "mask_id"_a, "Undoes one keep_block_maps(). mask_id: its result.");

  m.def(
      "append_rows",
      [](nb::handle keys, nb::handle values, const mx::array& new_keys, const mx::array& new_values, int offset,
         int group_size, int bits) -> nb::object {
        auto [k, v] = std::pair(as_quantised(keys), as_quantised(values));
        if (!k[0] || !v[0]) return nb::none();
        auto read = append({k[0], k[1], k[2], v[0], v[1], v[2]}, new_keys, new_values, offset, group_size, bits);
        if (!read) return nb::none();
        const auto rows = [&](size_t at) { return nb::make_tuple((*read)[at], (*read)[at + 1], (*read)[at + 2]); };
        return nb::make_tuple(rows(0), rows(3));
      },
      "keys"_a, "values"_a, "new_keys"_a, "new_values"_a, "offset"_a, "group_size"_a, "bits"_a,
      "Appends rows to a quantised cache: see csrc/op/append.h. keys, values: words, scales and biases, whose array\n"
      "objects get the new content, as with array[..., offset:end, :] = rows. Returns keys and values up to the last\n"
      "new row, or None.");

  m.def("pack_tree", &pack_tree, "visible"_a, "The uint32 words of a bool array of Tree: see csrc/op/tree.h.");

  bind_calls(m);
}
