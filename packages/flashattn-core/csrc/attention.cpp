// The forward pass: what the op checks and builds, and what its primitive queues on the CPU or on Metal.
#include "attention.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "backend_call.h"
#include "checks.h"
#include "counts.h"
#include "cpu/check.h"
#include "cpu/threads.h"
#include "gradient.h"
#include "interrupt.h"

namespace flashattn {
namespace {

// MLX's CPU allocator returns large arrays to the system, so that each output is new memory: in pages of 4 KB its
// first writing costs 2 % of a long prefill.
void prefer_huge_pages(void* data, size_t size) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / kHugePage * kHugePage;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: the system may decline
  }
#else
  (void)data;
  (void)size;
#endif
}

}  // namespace

Choice plan(const Arguments& arguments, Backend backend) {
  check(arguments);
  return choose(backend, call_shape(Inputs(arguments), arguments.options), arguments.options.kernel);
}

std::vector<mx::array> attention(const Arguments& arguments, mx::StreamOrDevice stream_or_device) {
  mx::Stream stream = mx::to_stream(stream_or_device);
  kernel_of(plan(arguments, backend_of(stream)));
  if (stream.device == mx::Device::cpu) {
    cpu::initialise();  // nonsense in the environment fails here, where it can be caught
  }
  return mx::array::make_arrays(shapes_of_outputs(Inputs(arguments), arguments.options),
                                {arguments.query.dtype(), mx::float32},
                                std::make_shared<FlashAttention>(stream, arguments.options, present_in(arguments)),
                                primitive_inputs(arguments, stream));
}

void FlashAttention::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if (!are_aligned(inputs)) {
    return eval_cpu(aligned(inputs, stream()), outputs);
  }
  allocate(outputs);
  for (mx::array& output : outputs) {
    prefer_huge_pages(output.data<void>(), output.nbytes());
  }
  Inputs named(inputs, present_);
  cpu::AttentionArgs args = cpu_forward(named, options_, outputs[0], outputs[1]);
  cpu::check(args);  // here, where the caller still hears of it
  Kernel kernel = kernel_of(choose(Backend::cpu, call_shape(named, options_), options_.kernel));
  count(kernel);

  args.cancellation = cancelled_by_interrupt(args.params);
  auto& encoder = cpu_encoder(stream(), inputs, outputs);
  if (outputs[0].size() == 0) {
    return;
  }
  encoder.dispatch([kernel, args, expected = cpu::ExpectedJob()] {
    kernel == Kernel::cpu_decode ? cpu::decode(args) : cpu::prefill(args);
  });
}

void FlashAttention::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(outputs);
  Inputs named(inputs, present_);
  Kernel kernel = kernel_of(choose(Backend::metal, call_shape(named, options_), options_.kernel));
  count(kernel);
  if (outputs[0].size() == 0) {
    return;
  }
  metal::encode(metal_forward(kernel, named, options_, outputs[0], outputs[1]), stream());
}

std::vector<mx::array> FlashAttention::jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                           const std::vector<int>&) {
  throw std::invalid_argument("[flash_attention] forward-mode differentiation (jvp) is not supported");
}

std::vector<mx::array> FlashAttention::vjp(const std::vector<mx::array>& primals,
                                           const std::vector<mx::array>& cotangents, const std::vector<int>& argnums,
                                           const std::vector<mx::array>& outputs) {
  return gradients(stream(), options_, present_, primals, outputs, cotangents, argnums);
}

std::vector<mx::Shape> FlashAttention::output_shapes(const std::vector<mx::array>& inputs) {
  // Also called with new shapes by shapeless compilation, which has passed no check yet.
  Inputs named(inputs, present_);
  check_shapes(named, options_);
  kernel_of(choose(backend_of(stream()), call_shape(named, options_), options_.kernel));
  return shapes_of_outputs(named, options_);
}

std::shared_ptr<AttentionPrimitive> FlashAttention::copy() {
  return std::make_shared<FlashAttention>(stream(), options_, present_);
}

std::vector<mx::Dtype> FlashAttention::output_dtypes(const std::vector<mx::array>& inputs) const {
  return {inputs[0].dtype(), mx::float32};
}

}  // namespace flashattn
