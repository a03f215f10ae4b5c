// Assigns a call's arrays to the bindings of its launches. The backend makes the launches.
#include "gpu_call.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "../cuda/driver.h"
#include "../cuda/encode.h"
#include "../cuda/launch.h"
#include "../gpu/disk_cache.h"
#include "../metal/launch.h"
#include "recent.h"

namespace flashattn {
namespace {

using gpu::Binding, gpu::index;

// Describes a call, and collects the arrays that both the forward pass and the gradient use.
struct CallAndWork {
  gpu::Call call;
  gpu::Work work;

  CallAndWork(Variant variant, const Inputs& inputs, const Options& options, const Outputs& outputs)
      : call{.params = make_params(inputs, options, outputs),
             .dtype = dtype_of(inputs[Input::query]),
             .bias_dtype = dtype_of(inputs[Input::bias]),
             .sinks_dtype = dtype_of(inputs[Input::sinks]),
             .group_dtype = dtype_of(inputs[Input::key_scales]),
             .device = cuda::device(),
             .tiling = variant.tiling,
             .precision = variant.precision} {
    for (const InputRule& rule : kInputRules) {
      if (const mx::array* given = inputs[rule.input]) {
        set(gpu::binding_of(rule.input), *given);
      }
    }
    set(Binding::out, outputs.out);
    if (outputs.lse) set(Binding::lse, *outputs.lse);
    if (outputs.row_stats) set(Binding::row_stats, *outputs.row_stats);
    if (outputs.exact_out) set(Binding::exact_out, *outputs.exact_out);
  }

  void set(Binding binding, const mx::array& array) {
    call.present[index(binding)] = true;
    call.aligned[index(binding)] = array.offset() % 16 == 0 && array.nbytes() > 8;  // MLX may not align tiny buffers
    work.arrays[index(binding)] = array;
  }
};

// Returns the kernel's launches for the call, from a cache if possible. Launches do not depend on the addresses of
// arrays.
std::shared_ptr<const gpu::Launches> launches(Kernel kernel, const gpu::Call& call) {
  static_assert(std::is_trivially_copyable_v<gpu::Call>);
  struct Known {
    Kernel kernel;
    gpu::Call call;
    std::shared_ptr<const gpu::Launches> launches;
  };
  thread_local Recent<Known> recent;
  const auto is_same = [&](const Known& known) {
    return known.kernel == kernel && std::memcmp(&known.call, &call, sizeof(call)) == 0;
  };
  if (const Known* known = recent.find(is_same)) {
    return known->launches;
  }
  bool is_metal = backend_of(kernel) == Backend::metal;
  auto made = std::make_shared<gpu::Launches>(is_metal ? metal::launches(kernel, call) : cuda::launches(kernel, call));
  recent.keep({kernel, call, made});
  return made;
}

// The strides of a contiguous array.
Strides contiguous(int64_t heads, int64_t rows, int64_t columns) {
  return {.column = 1, .row = columns, .head = rows * columns, .batch = {heads * rows * columns}};
}

// Marks the block map as present if the op would add one to this call.
void mark_block_map(Backend backend, gpu::Call& call) {
  bool has_array = call.has(Binding::visible) || call.has(Binding::bias);
  call.present[index(Binding::block_map)] =
      has_array && has_block_map(backend, call.params.query_len, call.params.key_len);
}

// Describes the call as if its arrays were contiguous.
gpu::Call contiguous_call(Variant variant, const Inputs& inputs, const Options& options, bool has_exact_out) {
  const mx::array &query = inputs.query(), &key = inputs.key();
  gpu::Call call = CallAndWork(variant, inputs, options, {query, nullptr, nullptr}).call;  // query in place of out
  call.present[index(Binding::exact_out)] = has_exact_out;
  call.aligned.fill(true);
  AttentionParams& p = call.params;
  p.query = contiguous(p.num_heads, p.query_len, p.head_dim);
  p.key = contiguous(p.num_kv_heads, p.key_len, key.shape(kColumn));
  p.value = contiguous(p.num_kv_heads, p.key_len, inputs.value().shape(kColumn));
  mark_block_map(backend_of(variant.kernel), call);
  return call;
}

gpu::Launches backward_launches(Backend backend, const gpu::Call& call, const BackwardParams& strides) {
  return backend == Backend::metal ? metal::backward_launches(call, strides) : cuda::backward_launches(call, strides);
}

// Returns the gradient's launches for contiguous arrays, with cotangents of both out and lse.
gpu::Launches backward_launches_of(Backend backend, gpu::Call call) {
  for (Binding binding : {Binding::lse, Binding::row_stats, Binding::dout, Binding::dlse, Binding::delta, Binding::dq,
                          Binding::dk, Binding::dv}) {
    call.present[index(binding)] = true;
  }
  const AttentionParams& p = call.params;
  return backward_launches(backend, call,
                           {.dout = contiguous(p.num_heads, p.query_len, p.value_dim),
                            .dlse = contiguous(p.num_heads, p.query_len, 1),
                            .dq = contiguous(p.num_heads, p.query_len, p.head_dim),
                            .dk = contiguous(p.num_kv_heads, p.key_len, p.head_dim),
                            .dv = contiguous(p.num_kv_heads, p.key_len, p.value_dim)});
}

std::vector<gpu::Launch> launches_of(Kernel kernel, const gpu::Call& call) {
  if (pass_of(kernel) == Pass::forward) return launches(kernel, call)->launches;
  return backward_launches_of(backend_of(kernel), call).launches;
}

}  // namespace

gpu::Work forward_work(Variant variant, const Inputs& inputs, const Options& options, const Outputs& outputs) {
  CallAndWork both(variant, inputs, options, outputs);
  both.work.launches = launches(variant.kernel, both.call);
  return std::move(both.work);
}

std::vector<gpu::Launch> pipelines_of(Variant variant, const Inputs& inputs, const Options& options,
                                      bool has_exact_out) {
  std::vector<gpu::Launch> pipelines;
  const auto add = [&](const gpu::Call& call) {
    for (const gpu::Launch& launch : launches_of(variant.kernel, call)) {
      const auto is_same = [&](const gpu::Launch& one) { return one.specialisation == launch.specialisation; };
      if (std::none_of(pipelines.begin(), pipelines.end(), is_same)) pipelines.push_back(launch);
    }
  };
  std::vector<std::pair<int, int>> lengths(std::begin(kChecked), std::end(kChecked));
  if (variant.kernel == Kernel::cuda_prefill) lengths.push_back(kCheckedSharing);
  for (auto [query_len, key_len] : lengths) {
    gpu::Call contiguous = contiguous_call(variant, inputs, options, has_exact_out);
    if (contiguous.params.query_len > kFew) contiguous.params.query_len = query_len;
    contiguous.params.key_len = key_len;
    mark_block_map(backend_of(variant.kernel), contiguous);
    gpu::Call anywhere = contiguous, apart = contiguous;
    anywhere.aligned.fill(false);
    for (Strides* strides : {&apart.params.query, &apart.params.key, &apart.params.value}) strides->column = 2;
    for (const gpu::Call& call : {contiguous, anywhere, apart}) add(call);
  }
  return pipelines;
}

std::string source_text(const gpu::Launch& launch, Backend backend) {
  return backend == Backend::metal ? metal::source_text(launch) : cuda::source_text(launch);
}

void prepare_for_cuda(Variant variant, const Inputs& inputs, const Options& options, bool has_exact_out,
                      int device) try {
  gpu::Call call = contiguous_call(variant, inputs, options, has_exact_out);
  for (const gpu::Launch& launch : launches_of(variant.kernel, call)) {
    cuda::function_of(launch, device);
  }
} catch (const std::runtime_error& error) {
  throw NoKernelError(error.what());
}

gpu::Work backward_work(Variant variant, const Inputs& inputs, const Options& options, const GradientInputs& further,
                        const Gradients& gradients) {
  CallAndWork both(variant, inputs, options, further.saved);
  int batch_dims = both.call.params.batch_dims;
  const auto tensor_strides = [&](const mx::array& array) { return strides_of(array, batch_dims, kTensorAxes); };
  BackwardParams strides = {.dout = tensor_strides(further.out_gradient),
                            .dlse = {},
                            .dq = tensor_strides(gradients.query),
                            .dk = tensor_strides(gradients.key),
                            .dv = tensor_strides(gradients.value)};
  both.set(Binding::dout, further.out_gradient);
  if (further.lse_gradient) {
    both.set(Binding::dlse, *further.lse_gradient);
    strides.dlse = strides_of(*further.lse_gradient, batch_dims, kRowAxes);
  }
  both.set(Binding::dq, gradients.query);
  both.set(Binding::dk, gradients.key);
  both.set(Binding::dv, gradients.value);
  both.set(Binding::delta, gradients.delta);
  both.work.launches =
      std::make_shared<gpu::Launches>(backward_launches(backend_of(variant.kernel), both.call, strides));
  return std::move(both.work);
}

gpu::Work block_map_work(Backend backend, const mx::array& mask, const ArrayParams& params, const mx::array& map) {
  std::optional<Dtype> dtype;
  if (mask.dtype() != mx::bool_) dtype = dtype_of(&mask);
  gpu::Work work;
  work.launches = std::make_shared<gpu::Launches>(gpu::block_map_launches(backend, params, dtype));
  work.arrays[index(Binding::mask)] = mask;
  work.arrays[index(Binding::found_blocks)] = map;
  return work;
}

}  // namespace flashattn
