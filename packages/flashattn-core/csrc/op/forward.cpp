// The forward pass: the op, which builds lazy arrays, and its primitive, which queues kernels on each backend.
#include "forward.h"

#include "../call/fail.h"
#include "../cpu/threads.h"
#include "../cuda/driver.h"
#include "../dispatch/cpu_call.h"
#include "../dispatch/gpu_call.h"
#include "../dispatch/gpu_stream.h"
#include "../dispatch/memory.h"
#include "../request/checks.h"
#include "block_map.h"
#include "counts.h"
#include "derivatives.h"
#include "exporting.h"
#include "gradient.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "shapeless.h"
#include "unfused.h"

namespace flashattn {

namespace {

Outputs by_name(const std::vector<mx::array>& outputs) {
  bool out_alone = outputs.size() == 1;
  return {outputs[0], out_alone ? nullptr : &outputs[1], out_alone ? nullptr : &outputs[2]};
}

}  // namespace

Choice plan(const Arguments& arguments, Backend backend) {
  check_arguments(arguments);
  mx::Device gpu(mx::Device::gpu);
  bool is_here = backend != Backend::cpu && mx::is_available(gpu) && backend_of(gpu) == backend;
  try {
    if (is_here) require_device(backend, gpu);
    if (std::optional<Decision> known = is_here ? decided(arguments, backend, gpu) : std::nullopt) {
      return {known->variant,
              known->by_name ? "the call names this kernel" : "an earlier call of this kind chose this kernel"};
    }
  } catch (const NoKernelError& error) {
    return {std::nullopt, error.what()};
  }
  return choose(backend, call_shape(Inputs(arguments), arguments.options, backend, arguments.precision),
                arguments.kernel);
}

void require_device(Backend backend, mx::Device device) {
  if (backend == Backend::cpu) {
    cpu::initialise();
  } else if (backend == Backend::cuda) {
    cuda::check_device(device.index);
  }
}

std::vector<mx::array> attention(const Arguments& arguments, const Decision& decision, bool with_lse,
                                 const mx::Stream& stream) {
  Backend backend = backend_of(stream.device);
  std::vector<mx::array> inputs = primitive_inputs(arguments, backend, stream);
  if (is_traced(arguments) && is_exporting()) {
    Inputs given(arguments);
    if (is_shapeless() && (given.query().size() == 0 || given.key().size() == 0)) {
      fail("query and key have shapes ", given.query().shape(), " and ", given.key().shape(),
           ", expected some elements where MLX exports a shapeless function");
    }
    return unfused_attention(arguments.options, present_in(arguments), stream)(inputs);
  }
  Present present = present_in(arguments);
  add_block_map(arguments, inputs, present, backend, stream);
  // The gradient of a traced call may be requested later, and it also reads lse and row_stats.
  bool out_alone = !with_lse && !is_traced(arguments);
  auto primitive = std::make_shared<FlashAttention>(stream, arguments.options, decision, present, out_alone);
  std::vector<mx::Shape> shapes = shapes_of_outputs(Inputs(arguments), arguments.options);
  mx::Dtype dtype = inputs[0].dtype();
  if (out_alone) {  // one output takes MLX half as long to build and free as three
    return {mx::array(std::move(shapes[0]), dtype, std::move(primitive), std::move(inputs))};
  }
  return mx::array::make_arrays(std::move(shapes), {dtype, mx::float32, mx::float32}, primitive, inputs);
}

std::vector<mx::Shape> shapes_of_outputs(const Inputs& inputs, const Options& options) {
  const mx::array& query = inputs.query();
  mx::Shape lse(query.shape().begin(), query.shape().end() - 1);
  mx::Shape out = lse, row_stats = lse;
  out.push_back(columns_of(inputs.value(), options));
  row_stats.push_back(2);
  return {out, lse, row_stats};
}

std::vector<mx::array> FlashAttention::allocated(const Inputs& inputs, const std::vector<mx::array>& outputs) {
  std::vector<mx::array> all = outputs;
  if (out_alone_ && backend_of(stream().device) != Backend::cuda) {
    std::vector<mx::Shape> shapes = shapes_of_outputs(inputs, options_);
    all.emplace_back(std::move(shapes[1]), mx::float32, nullptr, std::vector<mx::array>{});
    all.emplace_back(std::move(shapes[2]), mx::float32, nullptr, std::vector<mx::array>{});
  }
  allocate(all, stream());
  return all;
}

void FlashAttention::eval_cpu(const std::vector<mx::array>& given_inputs, std::vector<mx::array>& given_outputs) {
  std::vector<mx::array> inputs = aligned_on_cpu(given_inputs, stream());
  Inputs named(inputs, present_);
  std::vector<mx::array> outputs = allocated(named, given_outputs);
  prefer_huge_pages(outputs);
  cpu::AttentionArgs args = forward_args(named, options_, by_name(outputs));
  Kernel kernel = variant_for(decision_, named, options_, Backend::cpu).kernel;
  if (decision_.is_counted) count(kernel);

  args.cancellation = cancellation_of(args.params);
  auto& encoder = cpu_encoder(stream(), inputs, outputs);
  encoder.add_temporaries({outputs.begin() + static_cast<ptrdiff_t>(given_outputs.size()), outputs.end()});
  if (outputs[0].size() == 0) {
    return;
  }
  // While `expected` exists, idle worker threads wait a moment for this job before they sleep.
  encoder.dispatch([kernel, args, expected = cpu::ExpectedJob()] {
    kernel == Kernel::cpu_decode ? cpu::decode(args) : cpu::prefill(args);
  });
}

void FlashAttention::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& given_outputs) {
  Inputs named(inputs, present_);
  std::vector<mx::array> outputs = allocated(named, given_outputs);
  Backend backend = backend_of(stream().device);
  Variant variant = variant_for(decision_, named, options_, backend);
  if (decision_.is_counted) count(variant.kernel);
  if (outputs[0].size() == 0) {
    return;
  }
  gpu::Work work = forward_work(variant, named, options_, by_name(outputs));
  work.temporaries.assign(outputs.begin() + static_cast<ptrdiff_t>(given_outputs.size()), outputs.end());
  run_on_gpu(work, stream());
}

std::vector<mx::array> FlashAttention::jvp(const std::vector<mx::array>& primals,
                                           const std::vector<mx::array>& tangents, const std::vector<int>& argnums) {
  const auto outputs = [unfused = unfused_attention(options_, present_, stream()), out_alone = out_alone_,
                        stream = stream()](const std::vector<mx::array>& inputs) {
    std::vector<mx::array> outputs = unfused(inputs);
    if (out_alone) {
      outputs.pop_back();
    } else {  // sinks_gradient() reads row_stats, but takes derivatives only of lse, so row_stats may be constant
      outputs.push_back(mx::zeros_like(mx::stack({outputs[1], outputs[1]}, -1, stream), stream));
    }
    return outputs;
  };
  return jvp_of(outputs, primals, tangents, argnums, stream());
}

std::vector<mx::array> FlashAttention::vjp(const std::vector<mx::array>& primals,
                                           const std::vector<mx::array>& cotangents, const std::vector<int>& argnums,
                                           const std::vector<mx::array>& outputs) {
  return gradients(stream(), options_, decision_, present_, primals, outputs, cotangents, argnums);
}

std::vector<mx::Shape> FlashAttention::output_shapes(const std::vector<mx::array>& inputs) {
  // Shapeless compilation calls this with new shapes, so the shapes are checked here.
  Inputs named(inputs, present_);
  check_shapes(named, options_);
  Backend backend = backend_of(stream().device);
  variant_for(decision_, named, options_, backend);  // throws if no kernel covers the shapes
  std::vector<mx::Shape> shapes = shapes_of_outputs(named, options_);
  return {shapes.begin(), shapes.begin() + (out_alone_ ? 1 : 3)};
}

std::shared_ptr<AttentionPrimitive> FlashAttention::copy() {
  return std::make_shared<FlashAttention>(stream(), options_, decision_, present_, out_alone_);
}

bool FlashAttention::is_equivalent(const mx::Primitive& other) const {
  return AttentionPrimitive::is_equivalent(other) && out_alone_ == static_cast<const FlashAttention&>(other).out_alone_;
}

std::vector<mx::Dtype> FlashAttention::output_dtypes(const std::vector<mx::array>& inputs) const {
  std::vector<mx::Dtype> dtypes = {inputs[0].dtype(), mx::float32, mx::float32};
  return {dtypes.begin(), dtypes.begin() + (out_alone_ ? 1 : 3)};
}

}  // namespace flashattn
