// The last kinds of calls are remembered: a decode step finds its own, and looks up nothing else.
#include "prepare.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "gpu_call.h"
#include "recent.h"
#include "trust.h"

namespace flashattn {
namespace {

// What all of this depends on, and more. Of the keys' number only the magnitude: a step has one more than the last.
struct Kind {
  Kernel kernel;  // that is taken where nothing was measured and all is right
  bool is_traced;
  int device;
  Options options;
  Present present;
  mx::Shape query;
  int num_kv_heads, value_dim, magnitude;
  mx::Dtype::Val dtypes[4];

  bool operator==(const Kind&) const = default;
};

Kind kind_of(Kernel kernel, bool is_traced, const Inputs& inputs, const Options& options, const Present& present,
             int device) {
  const auto dtype = [&](Input input) {
    const mx::array* array = inputs[input];
    return array ? mx::Dtype::Val(array->dtype()) : mx::Dtype::Val::bool_;
  };
  const mx::array& key = inputs.key();
  return {kernel,
          is_traced,
          device,
          options,
          present,
          inputs.query().shape(),
          key.shape(kHead),
          columns_of(inputs.value(), options),
          static_cast<int>(std::bit_width(static_cast<unsigned>(key.shape(kRow)))),
          {dtype(Input::query), dtype(Input::bias), dtype(Input::sinks), dtype(Input::key_scales)}};
}

// Set once, when the module is loaded, and never destroyed.
Preference& the_preference() {
  static Preference& preference = *new Preference;
  return preference;
}

bool is_traced(const Arguments& arguments) {
  const auto& inputs = arguments.inputs;
  return std::any_of(inputs.begin(), inputs.end(), [](const auto& input) { return input && input->is_tracer(); });
}

// The kernel that stands for all that compute the gradient; none if they do not cover the call.
std::optional<Tiled> gradient_kernel(const Inputs& inputs, const Options& options, Backend backend) try {
  check_backward(backend, call_shape(inputs, options, backend));
  return Tiled{backward_kernels(backend).front()};
} catch (const NoKernelError&) {
  return std::nullopt;
}

Choice choice(const Arguments& arguments, const Options& options, Backend backend) {
  return choose(backend, call_shape(Inputs(arguments), options, backend), options.kernel, options.preferred,
                options.failed);
}

}  // namespace

void set_preference(Preference preference) {
  the_preference() = std::move(preference);
}

std::optional<Tiled> preferred(const Arguments& arguments, Backend backend, mx::Device device) {
  if (arguments.options.kernel != "auto" || !the_preference()) {
    return std::nullopt;
  }
  CallShape shape = call_shape(Inputs(arguments), arguments.options, backend);
  Choice usual = choose(backend, shape, "auto");
  std::string preferred = usual.kernel ? the_preference()(arguments, device, name(*usual.kernel)) : "";
  return preferred.empty() ? std::nullopt : choose(backend, shape, preferred).kernel;
}

Options prepared(const Arguments& arguments, Backend backend, mx::Stream stream) {
  Inputs given(arguments);
  Options options = arguments.options;
  Kernel first_choice = kernel_of(choice(arguments, options, backend)).kernel;
  if (given.query().size() == 0) return options;  // what has no elements is not launched
  Present present = present_in(arguments);
  Kind kind = kind_of(first_choice, is_traced(arguments), given, options, present, stream.device.index);
  struct Known {
    Kind kind;
    Options options;
    std::string wrong;  // if no kernel is left
  };
  thread_local Recent<Known> recent;
  if (const Known* known = recent.find([&](const Known& one) { return one.kind == kind; })) {
    if (!known->wrong.empty()) throw NoKernelError(known->wrong);
    return known->options;
  }
  const auto refuse = [&](const std::string& wrong) {
    recent.keep({kind, options, "[flash_attention] " + wrong});
    throw NoKernelError("[flash_attention] " + wrong);
  };
  std::vector<mx::array> arrays = primitive_inputs(arguments, backend, stream);
  Inputs inputs(arrays, present);
  options.preferred = preferred(arguments, backend, stream.device);
  Tiled kernel = kernel_of(choice(arguments, options, backend));
  for (std::string first;;) {
    std::string wrong = wrong_with(kernel, arguments, inputs, stream);
    if (wrong.empty()) break;
    if (first.empty()) first = wrong;
    if (options.preferred == kernel) {
      options.preferred.reset();
    } else {
      options.failed = with(options.failed, kernel.kernel);
    }
    Choice next = options.kernel == "auto" ? choice(arguments, options, backend) : Choice{};
    if (!next.kernel) refuse(first);
    kernel = *next.kernel;
  }
  std::optional<Tiled> gradient = kind.is_traced ? gradient_kernel(inputs, options, backend) : std::nullopt;
  if (std::string wrong = gradient ? wrong_with(*gradient, arguments, inputs, stream) : ""; !wrong.empty()) {
    refuse(wrong);
  }
  if (backend == Backend::cuda) {
    prepare_for_cuda(kernel, inputs, options, stream.device.index);
    if (gradient) prepare_for_cuda(*gradient, inputs, options, stream.device.index);
  }
  if (!is_checking()) recent.keep({std::move(kind), options, ""});
  return options;
}

}  // namespace flashattn
