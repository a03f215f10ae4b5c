// Reads the strides of a call's arrays, and orders the output.
#include "strides.h"

namespace flashattn {

Strides strides_of(const mx::array& array, int batch_dims, AxesUsed axes) {
  Strides result = {};
  const auto stride = [&](int axis) { return axis < 0 || array.shape(axis) == 1 ? 0 : array.strides(axis); };
  int axis = static_cast<int>(array.ndim()) - axes.count();
  for (int d = 0; d < batch_dims; ++d) {
    result.batch[d] = stride(axis - batch_dims + d);
  }
  if (axes.head) result.head = stride(axis++);
  if (axes.row) result.row = stride(axis++);
  if (axes.column) result.column = stride(axis++);
  return result;
}

void order_by_query(mx::array& out) {
  int heads = out.shape(kHead), columns = out.shape(kColumn);
  if (heads == 1 || out.shape(kRow) == 1) return;
  mx::Strides strides = out.strides();
  strides.end()[kHead] = columns;
  strides.end()[kRow] = int64_t{heads} * columns;
  out.copy_shared_buffer(out, strides, {true, false, false}, out.data_size());
}

void set_strides(AttentionParams& params, const Inputs& inputs, const Outputs& outputs) {
#define FLASHATTN_SET_STRIDES(name, called, dtype, axes)                   \
  if (const mx::array* given = inputs[Input::name]) {                      \
    params.name = strides_of(*given, params.batch_dims, used(Axes::axes)); \
  }
  FLASHATTN_INPUTS(FLASHATTN_SET_STRIDES)
#undef FLASHATTN_SET_STRIDES
  params.out = strides_of(outputs.out, params.batch_dims, kTensorAxes);
  if (outputs.lse) params.lse = strides_of(*outputs.lse, params.batch_dims, kRowAxes);
  if (outputs.row_stats) params.row_stats = strides_of(*outputs.row_stats, params.batch_dims, kTensorAxes);
}

}  // namespace flashattn
