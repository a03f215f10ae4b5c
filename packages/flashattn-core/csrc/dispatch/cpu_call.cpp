// Collects the pointers of a call's arrays, and registers the arrays with MLX's CPU encoder.
#include "cpu_call.h"

namespace flashattn {
namespace {

template <typename T>
void set_pointer(const T*& pointer, const mx::array* array) {
  pointer = array ? static_cast<const T*>(array->data<void>()) : nullptr;
}

}  // namespace

cpu::AttentionArgs forward_args(const Call& call, const Inputs& inputs, const Outputs& outputs) {
  cpu::AttentionArgs args = {call};
  set_strides(args.params, inputs, outputs);
#define FLASHATTN_SET_POINTER(name, ...) set_pointer(args.name, inputs[Input::name]);
  FLASHATTN_INPUTS(FLASHATTN_SET_POINTER)
#undef FLASHATTN_SET_POINTER
  // The forward pass writes these arrays, the backward pass only reads them.
  args.out = const_cast<void*>(outputs.out.data<void>());
  if (outputs.exact_out) args.exact_out = const_cast<float*>(outputs.exact_out->data<float>());
  args.lse = const_cast<float*>(outputs.lse->data<float>());
  args.row_stats = const_cast<float*>(outputs.row_stats->data<float>());
  return args;
}

cpu::BackwardArgs backward_args(Kernel forward_kernel, const Call& call, const Inputs& inputs,
                                const GradientInputs& further, const Gradients& gradients) {
  cpu::AttentionArgs forward = forward_args(call, inputs, further.saved);
  int batch_dims = forward.params.batch_dims;
  return {
      .forward = forward,
      .decoded = forward_kernel == Kernel::cpu_decode,
      .exact_out = further.saved.out.data<float>(),
      .out_gradient = further.out_gradient.data<void>(),
      .lse_gradient = further.lse_gradient.data<float>(),
      .out_gradient_strides = strides_of(further.out_gradient, batch_dims, kTensorAxes),
      .lse_gradient_strides = strides_of(further.lse_gradient, batch_dims, kRowAxes),
      .query_gradient = gradients.query.data<void>(),
      .key_gradient = gradients.key.data<void>(),
      .value_gradient = gradients.value.data<void>(),
      .delta = gradients.delta.data<float>(),
  };
}

mx::cpu::CommandEncoder& cpu_encoder(const mx::Stream& stream, const Arrays& inputs, Arrays& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (const mx::array& input : inputs) {
    encoder.set_input_array(input);
  }
  for (mx::array& output : outputs) {
    encoder.set_output_array(output);
  }
  return encoder;
}

}  // namespace flashattn
