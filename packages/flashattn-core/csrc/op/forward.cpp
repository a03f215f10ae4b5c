// The forward pass: the op, which builds lazy arrays, and its primitive, which queues kernels on each backend.
#include "forward.h"

#include <typeinfo>

#include "../call/fail.h"
#include "../cpu/threads.h"
#include "../dispatch/cpu_call.h"
#include "../dispatch/gpu_call.h"
#include "../dispatch/memory.h"
#include "../request/checks.h"
#include "../request/counts.h"
#include "append.h"
#include "block_map.h"
#include "deferred.h"
#include "exporting.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "shapeless.h"
#include "unfused.h"

namespace flashattn {

namespace {

Outputs by_name(const Arrays& outputs) {
  const auto at = [&](size_t i) { return i < outputs.size() ? &outputs[i] : nullptr; };
  return {outputs[0], at(1), at(2), at(3)};
}

// The array whose first rows append() has returned as `rows`, if nobody has evaluated these; else null.
const mx::array* appended_array(const mx::array& rows) {
  if (rows.status() != mx::array::Status::unscheduled || !rows.has_primitive()) return nullptr;
  const mx::Primitive& primitive = rows.primitive();
  return typeid(primitive) == typeid(FirstRows) ? &rows.inputs()[0] : nullptr;
}

// If append() has returned key and value, replaces them by the cache's whole arrays. Returns how many rows of these the
// call reads; 0: all.
int take_whole_arrays(Arrays& inputs, const Present& present) {
  Inputs named(inputs, present);
  if (!appended_array(named.key())) return 0;
  Arrays whole = inputs;
  for (const InputRule& rule : kInputRules) {
    const mx::array* rows = named[rule.input];
    if (rule.axes != Axes::tensor || rule.input == Input::query || !rows) continue;
    const mx::array* array = appended_array(*rows);
    if (!array) return 0;
    whole[rows - inputs.data()] = *array;
  }
  int key_len = named.key().shape(kRow);
  inputs = std::move(whole);
  return key_len;
}

}  // namespace

Arrays attention(const Arguments& arguments, const Selection& selection, bool with_lse, const mx::Stream& stream,
                 bool with_exact_out) {
  Backend backend = backend_of(stream.device);
  Arrays inputs = primitive_inputs(arguments, backend, stream);
  Inputs given(arguments);
  Present present = present_in(arguments);
  bool traced = is_traced(arguments);
  if (traced && is_exporting()) {
    if (is_shapeless() && (given.query().size() == 0 || given.key().size() == 0)) {
      fail("query and key have shapes ", given.query().shape(), " and ", given.key().shape(),
           ", expected some elements where MLX exports a shapeless function");
    }
    return unfused_attention(arguments.options, present, stream)(inputs);
  }
  add_block_map(arguments, inputs, present, backend, stream);
  // The gradient of a traced call may be requested later, and it also reads the other outputs.
  with_exact_out = with_exact_out || (traced && saves_exact_out(describe(arguments), backend));
  int num_outputs = with_exact_out ? 4 : with_lse || traced ? 3 : 1;
  int key_len = arguments.options.bits > 0 && !traced ? take_whole_arrays(inputs, present) : 0;
  Settings settings = {arguments.options, selection, present, num_outputs, key_len};
  std::vector<mx::Shape> shapes = shapes_of_outputs(given, arguments.options);
  if (num_outputs == 1) {  // one output takes MLX half as long to build and free as three
    mx::Dtype dtype = inputs[0].dtype();
    auto primitive = std::make_shared<FlashAttention>(stream, settings);
    return {mx::array(std::move(shapes[0]), dtype, std::move(primitive), std::move(inputs))};
  }
  shapes.resize(num_outputs);
  return FlashAttention::outputs_of(stream, settings, std::move(shapes), inputs);
}

std::vector<mx::Shape> shapes_of_outputs(const Inputs& inputs, const Options& options) {
  const mx::array& query = inputs.query();
  mx::Shape lse(query.shape().begin(), query.shape().end() - 1);
  mx::Shape out = lse, row_stats = lse;
  out.push_back(columns_of(inputs.value(), options));
  row_stats.push_back(2);
  return {out, lse, row_stats, out};
}

Arrays FlashAttention::allocated(const Inputs& inputs, const Arrays& outputs) {
  Arrays all = outputs;
  if (settings_.num_outputs == 1 && backend_of(stream().device) != Backend::cuda) {
    std::vector<mx::Shape> shapes = shapes_of_outputs(inputs, settings_.options);
    all.emplace_back(std::move(shapes[1]), mx::float32, nullptr, Arrays{});
    all.emplace_back(std::move(shapes[2]), mx::float32, nullptr, Arrays{});
  }
  allocate(all, stream());
  order_by_query(all[0]);
  if (settings_.num_outputs == 4) order_by_query(all[3]);  // exact_out has the strides of out
  return all;
}

Call FlashAttention::described(const Inputs& inputs) const {
  Call call = describe(inputs, settings_.options);
  if (settings_.key_len > 0) call.params.key_len = settings_.key_len;
  return call;
}

void FlashAttention::eval_cpu(const Arrays& given_inputs, Arrays& given_outputs) {
  Arrays inputs = aligned_on_cpu(given_inputs, stream());
  Inputs named(inputs, settings_.present);
  Arrays outputs = allocated(named, given_outputs);
  prefer_huge_pages(outputs);
  Call call = described(named);
  cpu::AttentionArgs args = forward_args(call, named, by_name(outputs));
  Kernel kernel = variant_for(settings_.selection, call, {}).kernel;
  if (settings_.selection.is_counted) count(kernel);

  auto& encoder = cpu_encoder(stream(), inputs, outputs);
  encoder.add_temporaries({outputs.begin() + static_cast<ptrdiff_t>(given_outputs.size()), outputs.end()});
  if (outputs[0].size() == 0) {
    return;
  }
  // While `expected` exists, idle worker threads wait a moment for this job before they sleep.
  encoder.dispatch(whole_or_nan(outputs, [kernel, args, expected = cpu::ExpectedJob()] {
    kernel == Kernel::cpu_decode ? cpu::decode(args) : cpu::prefill(args);
  }));
}

void FlashAttention::eval_gpu(const Arrays& inputs, Arrays& given_outputs) {
  Inputs named(inputs, settings_.present);
  Arrays outputs = allocated(named, given_outputs);
  Call call = described(named);
  Device device = device_of(stream().device);
  Variant variant = variant_for(settings_.selection, call, device);
  if (settings_.selection.is_counted) count(variant.kernel);
  if (outputs[0].size() == 0) {
    return;
  }
  gpu::Work work = forward_work(variant, call, device, named, by_name(outputs));
  work.temporaries.assign(outputs.begin() + static_cast<ptrdiff_t>(given_outputs.size()), outputs.end());
  run_on_gpu(work, stream());
}

Arrays FlashAttention::jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) {
  const auto outputs = [unfused = unfused_attention(settings_.options, settings_.present, stream()),
                        count = settings_.num_outputs, stream = stream()](const Arrays& inputs) {
    Arrays outputs = unfused(inputs);
    if (count == 1) {
      outputs.pop_back();
      return outputs;
    }
    // The tangents of row_stats and exact_out are not needed, so both may be constant. sinks_gradient() reads
    // row_stats, but takes derivatives only of lse. The gradient's own derivatives do not read saved outputs.
    outputs.push_back(mx::zeros_like(mx::stack({outputs[1], outputs[1]}, -1, stream), stream));
    if (count == 4) outputs.push_back(mx::zeros_like(mx::astype(outputs[0], mx::float32, stream), stream));
    return outputs;
  };
  return jvp_of(outputs, primals, tangents, argnums, stream());
}

std::vector<mx::Shape> FlashAttention::output_shapes(const Arrays& inputs) {
  Inputs named(inputs, settings_.present);
  // Shapeless compilation calls this with new shapes, so the shapes are checked here. The shapes of whole arrays do not
  // change, because nobody traces the call, and they need not fit each other or the masks.
  if (settings_.key_len == 0) {
    check_shapes(named, settings_.options);
    Call call = describe(named, settings_.options);
    variant_for(settings_.selection, call, device_of(stream().device));  // throws if no kernel covers the shapes
  }
  std::vector<mx::Shape> shapes = shapes_of_outputs(named, settings_.options);
  return {shapes.begin(), shapes.begin() + settings_.num_outputs};
}

}  // namespace flashattn
