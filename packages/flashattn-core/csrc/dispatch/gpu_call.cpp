// Assigns a call's arrays to the bindings of its launches. The backend makes the launches.
#include "gpu_call.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "../cuda/launch.h"
#include "../metal/launch.h"

namespace flashattn {
namespace {

using gpu::Binding, gpu::index;

gpu::GpuCall on_gpu(Variant variant, const Call& call, const Device& device) {
  gpu::GpuCall result = {{call}};
  result.precision = variant.precision;
  result.small_blocks = variant.small_blocks;
  result.device = device;
  return result;
}

// Collects the arrays that both the forward pass and the gradient use.
struct CallAndWork {
  gpu::GpuCall call;
  gpu::Work work;

  CallAndWork(Variant variant, const Call& described, const Device& device, const Inputs& inputs,
              const Outputs& outputs)
      : call(on_gpu(variant, described, device)) {
    set_strides(call.params, inputs, outputs);
    for (const InputRule& rule : kInputRules) {
      if (const mx::array* given = inputs[rule.input]) {
        set(gpu::binding_of(rule.input), *given);
      }
    }
    set(Binding::out, outputs.out);
    call.has_row_results = outputs.lse != nullptr;
    call.has_exact_out = outputs.exact_out != nullptr;
    if (outputs.lse) set(Binding::lse, *outputs.lse);
    if (outputs.row_stats) set(Binding::row_stats, *outputs.row_stats);
    if (outputs.exact_out) set(Binding::exact_out, *outputs.exact_out);
  }

  void set(Binding binding, const mx::array& array) {
    call.aligned[index(binding)] = array.offset() % 16 == 0 && array.nbytes() > 8;  // MLX may not align tiny buffers
    work.arrays[index(binding)] = array;
  }
};

// Returns the kernel's launches for the call, from a cache if possible. Launches do not depend on the addresses of
// arrays.
std::shared_ptr<const gpu::Launches> launches(Kernel kernel, const gpu::GpuCall& call) {
  static_assert(std::is_trivially_copyable_v<gpu::GpuCall>);
  struct Known {
    Kernel kernel;
    gpu::GpuCall call;
    std::shared_ptr<const gpu::Launches> launches;
  };
  thread_local std::array<std::optional<Known>, 8> recent;  // the layers of a model make only a few different calls
  thread_local size_t next = 0;
  for (const std::optional<Known>& known : recent) {
    if (known && known->kernel == kernel && std::memcmp(&known->call, &call, sizeof(call)) == 0) return known->launches;
  }
  bool is_metal = backend_of(kernel) == Backend::metal;
  auto made = std::make_shared<gpu::Launches>(is_metal ? metal::launches(kernel, call) : cuda::launches(kernel, call));
  recent[next++ % recent.size()] = Known{kernel, call, made};
  return made;
}

// The strides of a contiguous array.
Strides contiguous(int64_t heads, int64_t rows, int64_t columns) {
  return {.column = 1, .row = columns, .head = rows * columns, .batch = {heads * rows * columns}};
}

// Describes the call as if its arrays were contiguous.
gpu::GpuCall contiguous_call(Variant variant, const Call& described, const Device& device) {
  gpu::GpuCall call = on_gpu(variant, described, device);
  call.has_exact_out = saves_exact_out(described, device.backend);
  call.aligned.fill(true);
  AttentionParams& p = call.params;
  const auto columns = [&](int dim) { return p.bits == 0 ? dim : dim * p.bits / 32; };  // words, if quantised
  p.query = contiguous(p.num_heads, p.query_len, p.head_dim);
  p.key = contiguous(p.num_kv_heads, p.key_len, columns(p.head_dim));
  p.value = contiguous(p.num_kv_heads, p.key_len, columns(p.value_dim));
  p.out = contiguous(p.num_heads, p.query_len, p.value_dim);
  bool has_array = call.has(Input::visible) || call.has(Input::bias);
  call.given[index(Input::block_map)] = has_array && has_block_map(device.backend, p.query_len, p.key_len);
  return call;
}

gpu::Launches backward_launches(Backend backend, const gpu::GpuCall& call, const BackwardParams& strides) {
  return backend == Backend::metal ? metal::backward_launches(call, strides) : cuda::backward_launches(call, strides);
}

// A gradient's launches are those for contiguous arrays.
std::vector<gpu::Launch> launches_of(Kernel kernel, const gpu::GpuCall& call) {
  if (pass_of(kernel) == Pass::forward) return launches(kernel, call)->launches;
  const AttentionParams& p = call.params;
  BackwardParams strides = {.dout = contiguous(p.num_heads, p.query_len, p.value_dim),
                            .dlse = contiguous(p.num_heads, p.query_len, 1),
                            .dq = contiguous(p.num_heads, p.query_len, p.head_dim),
                            .dk = contiguous(p.num_kv_heads, p.key_len, p.head_dim),
                            .dv = contiguous(p.num_kv_heads, p.key_len, p.value_dim)};
  return backward_launches(backend_of(kernel), call, strides).launches;
}

}  // namespace

gpu::Work forward_work(Variant variant, const Call& call, const Device& device, const Inputs& inputs,
                       const Outputs& outputs) {
  CallAndWork both(variant, call, device, inputs, outputs);
  both.work.launches = launches(variant.kernel, both.call);
  return std::move(both.work);
}

std::vector<gpu::Launch> programs_of(Variant variant, const Call& call, const Device& device) {
  std::vector<gpu::Launch> programs;
  const auto add = [&](const gpu::GpuCall& call) {
    for (const gpu::Launch& launch : launches_of(variant.kernel, call)) {
      const auto is_same = [&](const gpu::Launch& one) { return one.specialisation == launch.specialisation; };
      if (std::none_of(programs.begin(), programs.end(), is_same)) programs.push_back(launch);
    }
  };
  std::vector<std::pair<int, int>> lengths(std::begin(kChecked), std::end(kChecked));
  if (variant.kernel == Kernel::cuda_prefill) lengths.push_back(kCheckedSharing);
  for (auto [query_len, key_len] : lengths) {
    Call of_lengths = call;
    if (call.params.query_len > max_exact_queries(device.backend)) of_lengths.params.query_len = query_len;
    of_lengths.params.key_len = key_len;
    gpu::GpuCall contiguous = contiguous_call(variant, of_lengths, device), anywhere = contiguous, apart = contiguous;
    anywhere.aligned.fill(false);
    for (Strides* strides : {&apart.params.query, &apart.params.key, &apart.params.value}) strides->column = 2;
    for (const gpu::GpuCall& each : {contiguous, anywhere, apart}) add(each);
  }
  return programs;
}

std::vector<gpu::Launch> usual_programs_of(Variant variant, const Call& call, const Device& device) {
  return launches_of(variant.kernel, contiguous_call(variant, call, device));
}

std::string source_text(const gpu::Launch& launch, Backend backend) {
  return backend == Backend::metal ? metal::source_text(launch) : cuda::source_text(launch);
}

gpu::Work backward_work(Variant variant, const Call& call, const Device& device, const Inputs& inputs,
                        const GradientInputs& further, const Gradients& gradients) {
  CallAndWork both(variant, call, device, inputs, further.saved);
  int batch_dims = both.call.params.batch_dims;
  const auto tensor_strides = [&](const mx::array& array) { return strides_of(array, batch_dims, kTensorAxes); };
  BackwardParams strides = {.dout = tensor_strides(further.out_gradient),
                            .dlse = strides_of(further.lse_gradient, batch_dims, kRowAxes),
                            .dq = tensor_strides(gradients.query),
                            .dk = tensor_strides(gradients.key),
                            .dv = tensor_strides(gradients.value)};
  both.set(Binding::dout, further.out_gradient);
  both.set(Binding::dlse, further.lse_gradient);
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
  if (mask.dtype() != mx::bool_) dtype = dtype_of(mask.dtype());
  gpu::Work work;
  work.launches = std::make_shared<gpu::Launches>(gpu::block_map_launches(backend, params, dtype));
  work.arrays[index(Binding::mask)] = mask;
  work.arrays[index(Binding::found_blocks)] = map;
  return work;
}

gpu::Work append_work(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs,
                      const std::array<bool, 6>& in_place, int offset, int group_size, int bits) {
  const mx::array &keys = inputs[6], &values = inputs[7];
  cuda::NewRows rows = {};
  rows.dtype = dtype_of(keys.dtype());
  AttentionParams& p = rows.params;
  p.batch_size = keys.shape(0);
  p.num_kv_heads = keys.shape(1);
  p.key_len = outputs[0].shape(kRow);
  p.head_dim = keys.shape(kColumn);
  p.value_dim = values.shape(kColumn);
  p.bits = bits;
  p.group_size = group_size;
  p.key = strides_of(keys, 1, kTensorAxes);
  p.value = strides_of(values, 1, kTensorAxes);
  rows.split = {.first_key = offset, .chunk_len = keys.shape(kRow), .num_chunks = 0, .whole_blocks = 0};
  rows.in_place = in_place;
  static_assert(std::is_trivially_copyable_v<cuda::NewRows>);
  thread_local cuda::NewRows last;  // the layers of a model append at the same offset
  thread_local std::shared_ptr<const gpu::Launches> launches;
  if (!launches || std::memcmp(&last, &rows, sizeof(rows)) != 0) {
    launches = std::make_shared<gpu::Launches>(cuda::append_launches(rows));
    std::memcpy(&last, &rows, sizeof(rows));
  }
  gpu::Work work = {.launches = launches, .arrays = {}, .temporaries = {}};
  work.arrays[index(Binding::new_keys)] = keys;
  work.arrays[index(Binding::new_values)] = values;
  for (int i = 0; i < 6; ++i) {
    if (!in_place[i]) work.arrays[index(Binding::old_key_words) + i] = inputs[i];
    work.arrays[index(Binding::stored_key_words) + i] = outputs[i];
  }
  return work;
}

}  // namespace flashattn
