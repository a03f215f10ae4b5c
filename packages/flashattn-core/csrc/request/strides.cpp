// Fills AttentionParams from a call's arrays and options.
#include "strides.h"

#include <cmath>

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

AttentionParams make_params(const Inputs& inputs, const Options& options, const Outputs& outputs) {
  const mx::array &query = inputs.query(), &key = inputs.key();
  AttentionParams params = {};
  params.batch_dims = static_cast<int32_t>(query.ndim()) - 3;
  params.batch_size = 1;
  for (int d = 0; d < params.batch_dims; ++d) {
    params.batch_shape[d] = query.shape(d);
    params.batch_size *= query.shape(d);
  }
  params.num_heads = query.shape(kHead);
  params.num_kv_heads = key.shape(kHead);
  params.query_len = query.shape(kRow);
  params.key_len = key.shape(kRow);
  params.head_dim = query.shape(kColumn);
  params.value_dim = columns_of(inputs.value(), options);
  params.tree_size = inputs[Input::tree] ? inputs[Input::tree]->shape(-2) : 0;
  // The default scale is not computed when the call is built, because shapeless compilation may change D later.
  params.scale = options.scale.value_or(1 / std::sqrt(static_cast<float>(params.head_dim)));
#define FLASHATTN_SET_OPTION(type, name) params.name = options.name;
  FLASHATTN_OPTIONS(FLASHATTN_SET_OPTION)
#undef FLASHATTN_SET_OPTION

#define FLASHATTN_SET_STRIDES(name, called, dtype, axes)                   \
  if (const mx::array* given = inputs[Input::name]) {                      \
    params.name = strides_of(*given, params.batch_dims, used(Axes::axes)); \
  }
  FLASHATTN_INPUTS(FLASHATTN_SET_STRIDES)
#undef FLASHATTN_SET_STRIDES
  params.out = strides_of(outputs.out, params.batch_dims, kTensorAxes);
  if (outputs.lse) params.lse = strides_of(*outputs.lse, params.batch_dims, kRowAxes);
  if (outputs.row_stats) params.row_stats = strides_of(*outputs.row_stats, params.batch_dims, kTensorAxes);
  return params;
}

Dtype dtype_of(const mx::array* array) {
  if (!array || array->dtype() == mx::float32) {
    return Dtype::float32;
  }
  return array->dtype() == mx::float16 ? Dtype::float16 : Dtype::bfloat16;
}

}  // namespace flashattn
