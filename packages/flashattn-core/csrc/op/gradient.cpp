// The gradient of attention. A primitive computes the gradients of query, key and value. MLX's operations compute all
// other gradients.
#include <algorithm>
#include <optional>
#include <tuple>

#include "../call/fail.h"
#include "../dispatch/cpu_call.h"
#include "../dispatch/gpu_call.h"
#include "../dispatch/memory.h"
#include "../request/counts.h"
#include "deferred.h"
#include "forward.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "sinks_gradient.h"
#include "unfused.h"

namespace flashattn {
namespace {

// The order of the gradient's last inputs, which follow the inputs of the forward pass. The first is exact_out if the
// forward pass saved it, otherwise out. row_stats and exact_out have no cotangents, because callers do not get them.
enum Further { kOut, kLse, kRowStats, kOutGradient, kLseGradient, kNumFurther };

GradientInputs further_inputs(const Arrays& inputs) {
  const mx::array* further = &inputs[inputs.size() - kNumFurther];
  const mx::array& out = further[kOut];
  const mx::array* exact_out = out.dtype() == inputs[0].dtype() ? nullptr : &out;
  return {{out, &further[kLse], &further[kRowStats], exact_out}, further[kOutGradient], further[kLseGradient]};
}

Gradients named(Arrays& outputs) {
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

void count_backward(Backend backend) {
  for (Kernel kernel : backward_kernels(backend)) {
    count(kernel);
  }
}

// Returns a function that is built from MLX's operations, and has the inputs and outputs of FlashAttentionGradient. It
// computes the forward pass again, and ignores the saved outputs of the forward pass.
Function unfused_gradient(const Options& options, const Present& present, const mx::Stream& s) {
  return [=](const Arrays& all) {
    Function attention = unfused_attention(options, present, s);
    const auto exact = [&](const mx::array& array) { return mx::astype(array, mx::float32, s); };
    const auto of_tensors = [&](const Arrays& tensors) {
      Arrays inputs(all.begin(), all.end() - kNumFurther);
      std::transform(tensors.begin(), tensors.end(), inputs.begin(), exact);  // so that out is not rounded
      return attention(inputs);
    };
    GradientInputs further = further_inputs(all);
    mx::array out_gradient = exact(further.out_gradient);
    auto [outputs, gradients] =
        mx::vjp(of_tensors, {all.begin(), all.begin() + kNumTensors}, {out_gradient, further.lse_gradient});
    mx::array products = mx::multiply(out_gradient, outputs[0], s);
    gradients.push_back(mx::subtract(mx::sum(products, -1, false, s), further.lse_gradient, s));
    return gradients;
  };
}

// Inputs: the inputs of FlashAttention, then those of Further. Outputs: the gradients of query, key and value, then
// delta, see cpu/backward.h.
class FlashAttentionGradient : public AttentionPrimitive<FlashAttentionGradient> {
 public:
  static constexpr int kNumRounded = 3;
  using AttentionPrimitive::AttentionPrimitive;

  const char* name() const override { return "FlashAttentionGradient"; }

  void eval_cpu(const Arrays& given_inputs, Arrays& outputs) override {
    Arrays inputs = aligned_on_cpu(given_inputs, stream());
    allocate(outputs, stream());
    Inputs forward_inputs(inputs, settings_.present);
    Call call = describe(forward_inputs, settings_.options);
    Kernel forward = variant_for(settings_.selection, call, {}).kernel;
    cpu::BackwardArgs args = backward_args(forward, call, forward_inputs, further_inputs(inputs), named(outputs));
    if (settings_.selection.is_counted) count_backward(Backend::cpu);
    cpu_encoder(stream(), inputs, outputs).dispatch(whole_or_nan(outputs, [args] { cpu::backward(args); }));
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    allocate(outputs, stream());
    Device device = device_of(stream().device);
    if (settings_.selection.is_counted) count_backward(device.backend);
    Inputs forward_inputs(inputs, settings_.present);
    Call call = describe(forward_inputs, settings_.options);
    Variant variant = backward_variant(call, device);
    run_on_gpu(backward_work(variant, call, device, forward_inputs, further_inputs(inputs), named(outputs)), stream());
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) override {
    return vjp_of(unfused_gradient(settings_.options, settings_.present, stream()), primals, cotangents, argnums,
                  stream());
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    return jvp_of(unfused_gradient(settings_.options, settings_.present, stream()), primals, tangents, argnums,
                  stream());
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    Call call = describe(Inputs(inputs, settings_.present), settings_.options);
    backward_variant(call, device_of(stream().device));  // throws if no kernel covers the call
    // In a shapeless function, the caller's cotangents may have other shapes than the outputs.
    GradientInputs further = further_inputs(inputs);
    for (auto [name, given, expected] : {std::tuple("out", &further.out_gradient, &further.saved.out),
                                         std::tuple("lse", &further.lse_gradient, further.saved.lse)}) {
      if (given->shape() != expected->shape() && expected->size() > 0) {
        fail("the cotangent of ", name, " has shape ", given->shape(), ", expected ", expected->shape());
      }
    }
    return {inputs[0].shape(), inputs[1].shape(), inputs[2].shape(), further.saved.lse->shape()};
  }
};

}  // namespace

Arrays FlashAttention::vjp(const Arrays& inputs, const Arrays& cotangents, const std::vector<int>& argnums,
                           const Arrays& outputs) {
  Inputs named(inputs, settings_.present);
  const mx::array* sinks = named[Input::sinks];
  const mx::array *bias = named[Input::bias], *slopes = named[Input::alibi_slopes];
  std::vector<int> of_kernels, of_graph;
  for (int argument : argnums) {
    const mx::array* input = &inputs[argument];
    bool has_kernel = mx::issubdtype(input->dtype(), mx::floating) && input != bias && input != slopes;
    (has_kernel ? of_kernels : of_graph).push_back(argument);
  }
  std::vector<std::optional<mx::array>> by_argument(inputs.size());
  if (!of_kernels.empty()) {
    Arrays all = inputs;
    const mx::array& out = outputs.size() > 3 ? outputs[3] : outputs[0];
    all.insert(all.end(), {out, outputs[1], outputs[2], cotangents[0], cotangents[1]});
    std::vector<mx::Shape> shapes = FlashAttentionGradient(stream(), settings_).output_shapes(all);
    Arrays computed = FlashAttentionGradient::outputs_of(stream(), settings_, std::move(shapes), all);
    const auto of_sinks = [stream = stream()](const Arrays& given) {
      return std::vector{sinks_gradient(given[0], {given[1], &given[2], &given[3]}, given[4], stream)};
    };
    for (int argument : of_kernels) {
      by_argument[argument] =
          argument < kNumTensors
              ? computed[argument]
              : deferred(of_sinks, {*sinks, outputs[0], outputs[1], outputs[2], computed[3]}, stream())[0];
    }
  }
  Arrays of_masks = vjp_of(unfused_attention(settings_.options, settings_.present, stream()), inputs,
                           {cotangents[0], cotangents[1]}, of_graph, stream());
  for (size_t i = 0; i < of_graph.size(); ++i) {
    by_argument[of_graph[i]] = of_masks[i];
  }
  Arrays result;
  for (int argument : argnums) {
    result.push_back(*by_argument[argument]);
  }
  return result;
}

}  // namespace flashattn
