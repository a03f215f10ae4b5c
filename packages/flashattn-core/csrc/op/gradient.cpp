// The gradient's primitive, and the parts of a gradient that are MLX's own operations.
#include "gradient.h"

#include "../call/fail.h"
#include "../cpu/contract.h"
#include "counts.h"
#include "cpu_call.h"
#include "gpu_call.h"
#include "gpu_stream.h"
#include "memory.h"
#include "mlx/ops.h"

namespace flashattn {
namespace {

// A sink's weight in a row is exp(sink - lse), and it brings no value: its gradient is -weight * delta, over all rows.
mx::array sinks_gradient(const mx::array& sinks, const mx::array& lse, const mx::array& delta,
                         const mx::Stream& stream) {
  mx::array sees_nothing = mx::isneginf(lse, stream);
  mx::array logits = mx::subtract(mx::expand_dims(sinks, -1, stream), lse, stream);
  mx::array terms = mx::negative(mx::multiply(mx::exp(logits, stream), delta, stream), stream);
  // After the product: delta may be NaN in a row that sees nothing.
  terms = mx::where(sees_nothing, mx::array(0.0f), terms, stream);
  if (stream.device == mx::Device::cpu) {
    // MLX adds one after the other there, with an error in float32 that grows with L. On the GPU it sums in a tree.
    terms = mx::astype(terms, mx::float64, stream);
  }
  mx::array gradient = mx::sum(terms, -1, false, stream);
  std::vector<int> broadcast;  // the leading dimensions that sinks do not have, or have once
  int missing = static_cast<int>(gradient.ndim() - sinks.ndim());
  for (int axis = 0; axis < static_cast<int>(gradient.ndim()); ++axis) {
    if (axis < missing || (sinks.shape(axis - missing) == 1 && gradient.shape(axis) != 1)) {
      broadcast.push_back(axis);
    }
  }
  gradient = mx::astype(mx::sum(gradient, broadcast, false, stream), sinks.dtype(), stream);
  return mx::reshape(gradient, sinks.shape(), stream);
}

// The gradient's inputs behind those of the forward pass: its outputs, and what comes back for two of them. Nobody sees
// row_stats, so nothing comes back for it.
enum Further { kOut, kLse, kRowStats, kOutGradient, kLseGradient, kNumFurther };
const std::vector<int> kDimsOfFurther = {3, 2, 3, 3, 2};  // besides the batch's

GradientInputs further_inputs(const std::vector<mx::array>& inputs) {
  const mx::array* further = &inputs[inputs.size() - kNumFurther];
  return {{further[kOut], &further[kLse], &further[kRowStats]}, further[kOutGradient], &further[kLseGradient]};
}

Gradients named(std::vector<mx::array>& outputs) {
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

void count_backward(Backend backend) {
  for (Kernel kernel : backward_kernels(backend)) {
    count(kernel);
  }
}

}  // namespace

std::vector<mx::array> gradients(const mx::Stream& stream, const Options& options, const Decision& decision,
                                 const Present& present, const std::vector<mx::array>& inputs,
                                 const std::vector<mx::array>& outputs, const std::vector<mx::array>& cotangents,
                                 const std::vector<int>& argnums) {
  Inputs named(inputs, present);
  Backend backend = backend_of(stream.device);
  check_backward(backend, call_shape(named, options, backend));
  const mx::array* sinks = named[Input::sinks];
  for (int argument : argnums) {
    if (argument >= kNumTensors && &inputs[argument] != sinks) {
      fail("there is no gradient of masks and alibi_slopes, only of query, key, value and sinks");
    }
  }
  std::vector<mx::array> all = inputs;
  all.insert(all.end(), outputs.begin(), outputs.end());
  all.insert(all.end(), {cotangents[0], cotangents[1]});
  auto primitive = std::make_shared<FlashAttentionGradient>(stream, options, decision, present);
  std::vector<mx::Shape> shapes = primitive->output_shapes(all);
  mx::Dtype dtype = named.query().dtype();
  auto computed = mx::array::make_arrays(std::move(shapes), {dtype, dtype, dtype, mx::float32}, primitive, all);
  std::vector<mx::array> result;
  for (int argument : argnums) {
    result.push_back(argument < kNumTensors ? computed[argument]
                                            : sinks_gradient(*sinks, outputs[1], computed[3], stream));
  }
  return result;
}

void FlashAttentionGradient::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if (!are_aligned(inputs, stream())) {
    return eval_cpu(aligned_on_cpu(inputs, stream()), outputs);
  }
  allocate(outputs, stream());
  Inputs forward_inputs(inputs, present_);
  Kernel forward = variant_for(decision_, forward_inputs, options_, Backend::cpu).kernel;
  cpu::BackwardArgs args = backward_args(forward, forward_inputs, options_, further_inputs(inputs), named(outputs));
  cpu::check(args);  // here, where the caller still hears of it
  if (decision_.is_counted) count_backward(Backend::cpu);
  args.forward.cancellation = cancellation_of(args.forward.params);
  cpu_encoder(stream(), inputs, outputs).dispatch([args] { cpu::backward(args); });
}

void FlashAttentionGradient::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if (!are_aligned(inputs, stream())) {
    return eval_gpu(aligned_on_gpu(inputs, stream()), outputs);
  }
  allocate(outputs, stream());
  Backend backend = backend_of(stream().device);
  if (decision_.is_counted) count_backward(backend);
  Inputs forward_inputs(inputs, present_);
  CallShape shape = call_shape(forward_inputs, options_, backend);
  shape.precision = decision_.precision;
  Variant variant = backward_variant(backend, shape);
  run_on_gpu(backward_work(variant, forward_inputs, options_, further_inputs(inputs), named(outputs)), stream());
}

std::vector<mx::array> FlashAttentionGradient::vjp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                                   const std::vector<int>&, const std::vector<mx::array>&) {
  throw std::invalid_argument("[flash_attention] second derivatives are not supported");
}

std::vector<mx::array> FlashAttentionGradient::jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                                   const std::vector<int>&) {
  throw std::invalid_argument("[flash_attention] second derivatives are not supported");
}

std::vector<mx::Shape> FlashAttentionGradient::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[0].shape(), inputs[1].shape(), inputs[2].shape(), further_inputs(inputs).saved.lse->shape()};
}

std::shared_ptr<AttentionPrimitive> FlashAttentionGradient::copy() {
  return std::make_shared<FlashAttentionGradient>(stream(), options_, decision_, present_);
}

std::vector<mx::Dtype> FlashAttentionGradient::output_dtypes(const std::vector<mx::array>& inputs) const {
  mx::Dtype dtype = inputs[0].dtype();
  return {dtype, dtype, dtype, mx::float32};
}

std::vector<int> FlashAttentionGradient::dims_of_further_inputs() const {
  return kDimsOfFurther;
}

}  // namespace flashattn
