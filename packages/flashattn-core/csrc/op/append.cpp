// Decides whether the kernel fits a cache, and in which arrays it writes in place. Makes the rows that attention reads.
#include "append.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>

#include "../cuda/driver.h"
#include "../dispatch/gpu_call.h"
#include "../dispatch/memory.h"
#include "mlx/backend/common/utils.h"
#include "mlx/ops.h"
#include "mlx/utils.h"

namespace flashattn {
namespace {

constexpr char kOnlyCuda[] = "append() makes this primitive only for CUDA";
constexpr int kMaxLength = 16;  // for more rows, MLX's own operations take a small part of the call's time

bool has_kernel(const mx::Device& device) try {
  if (backend_of(device) != Backend::cuda) return false;
  cuda::check_device(device.index);
  return true;
} catch (const NoKernelError&) {
  return false;
}

// Whether words, scales and biases can store `rows`, from `offset` on.
bool fit(mx::array* const* stored, const mx::array& rows, int capacity, int offset, int group_size, int bits) {
  if (rows.ndim() != 4 || rows.size() == 0 || rows.shape(kColumn) % group_size != 0) return false;
  const auto has = [&](const mx::array& array, int columns, mx::Dtype dtype) {
    return array.dtype() == dtype && array.shape() == mx::Shape{rows.shape(0), rows.shape(1), capacity, columns};
  };
  int columns = rows.shape(kColumn), groups = columns / group_size, length = rows.shape(kRow);
  return has(*stored[0], columns * bits / 32, mx::uint32) && has(*stored[1], groups, rows.dtype()) &&
         has(*stored[2], groups, rows.dtype()) && length <= kMaxLength && offset >= 0 && offset <= capacity - length &&
         stored[0]->size() < std::numeric_limits<int32_t>::max() / 2;  // the kernel counts a head's words by int
}

bool is_evaluated(const mx::array& array) {
  return array.status() != mx::array::Status::unscheduled;
}

}  // namespace

std::optional<std::vector<mx::array>> append(const std::array<mx::array*, 6>& stored, const mx::array& keys,
                                             const mx::array& values, int offset, int group_size, int bits) {
  const mx::Device& device = mx::default_device();
  if (!has_kernel(device) || (bits != 4 && bits != 8)) return std::nullopt;
  if (group_size != 32 && group_size != 64 && group_size != 128) return std::nullopt;
  bool is_float = keys.dtype() == mx::float32 || keys.dtype() == mx::float16 || keys.dtype() == mx::bfloat16;
  int capacity = stored[0]->ndim() == 4 ? stored[0]->shape(kRow) : 0;
  if (!is_float || keys.dtype() != values.dtype() || !fit(&stored[0], keys, capacity, offset, group_size, bits) ||
      !fit(&stored[3], values, capacity, offset, group_size, bits)) {
    return std::nullopt;
  }
  if (!std::equal(keys.shape().begin(), keys.shape().end() - 1, values.shape().begin())) return std::nullopt;
  mx::Stream stream = mx::default_stream(device);
  std::vector<mx::array> inputs;
  inputs.reserve(stored.size() + 2);
  std::array<bool, 6> needs_no_event;
  for (size_t i = 0; i < stored.size(); ++i) {
    const mx::array& array = *stored[i];
    bool is_known = is_evaluated(array);
    if (is_known && !array.flags().row_contiguous) return std::nullopt;
    needs_no_event[i] = array.is_donatable() && array.event().valid() && array.event().stream() == stream;
    inputs.push_back(is_known ? array : mx::contiguous(array, false, stream));
  }
  inputs.insert(inputs.end(), {keys, values});
  if (std::any_of(inputs.begin(), inputs.end(), [](const mx::array& each) { return each.is_tracer(); })) {
    return std::nullopt;
  }
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const mx::array* array : stored) {
    shapes.push_back(array->shape());
    dtypes.push_back(array->dtype());
  }
  auto primitive = std::make_shared<Append>(stream, offset, group_size, bits);
  std::vector<mx::array> outputs = mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs), read;
  auto first_rows = std::make_shared<FirstRows>(stream);
  read.reserve(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    stored[i]->overwrite_descriptor(outputs[i]);
    // For each input that has an event, MLX asks the driver whether it is done, which takes a microsecond. Here the
    // answer changes nothing: the same stream wrote the array, and only the new primitive still holds it.
    if (needs_no_event[i]) inputs[i].event() = {};
    mx::Shape shape = outputs[i].shape();
    *(shape.end() + kRow) = offset + keys.shape(kRow);
    read.emplace_back(std::move(shape), outputs[i].dtype(), first_rows, std::vector{outputs[i]});
  }
  return read;
}

void Append::eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::logic_error(kOnlyCuda);
}

std::vector<mx::Shape> Append::output_shapes(const std::vector<mx::array>& inputs) {
  std::vector<mx::Shape> shapes;
  for (size_t i = 0; i < 6; ++i) shapes.push_back(inputs[i].shape());
  return shapes;
}

void Append::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) try {
  // Each output refers to the inputs. MLX evaluates the primitive through one output, so the other references can go.
  // They would keep the inputs' memory from being reused.
  for (mx::array& output : outputs) {
    if (&output.inputs() != &inputs && !output.is_tracer()) output.inputs().clear();
  }
  std::array<bool, 6> in_place;
  for (size_t i = 0; i < in_place.size(); ++i) {
    in_place[i] = mx::is_donatable(inputs[i], outputs[i]) && inputs[i].flags().row_contiguous;
    if (in_place[i]) {
      outputs[i].copy_shared_buffer(inputs[i]);
    } else {
      std::vector<mx::array> one = {outputs[i]};
      allocate(one, stream());
    }
  }
  run_on_gpu(append_work(inputs, outputs, in_place, offset_, group_size_, bits_), stream());
} catch (...) {
  for (mx::array& output : outputs) {  // the program may evaluate them again, for example with less memory in use
    if (output.inputs().empty()) output.inputs() = inputs;
  }
  throw;
}

void FirstRows::eval_cpu(const std::vector<mx::array>&, mx::array&) {
  throw std::logic_error(kOnlyCuda);
}

void FirstRows::eval_gpu(const std::vector<mx::array>& inputs, mx::array& rows) {
  const mx::array& whole = inputs[0];
  // The rows end before the unused rows of the last head.
  size_t unused = static_cast<size_t>(whole.shape(kRow) - rows.shape(kRow)) * whole.shape(kColumn);
  size_t data_size = whole.size() - unused;
  bool is_contiguous = data_size == rows.size();
  rows.copy_shared_buffer(whole, whole.strides(), {is_contiguous, is_contiguous, false}, data_size);
}

}  // namespace flashattn
