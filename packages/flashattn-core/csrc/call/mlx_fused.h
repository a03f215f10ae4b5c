// The calls whose time with MLX's own fused kernels is compared with ours. For nearly all others MLX 0.32 writes the
// score matrix to memory; our kernel computes them all. Source: use_fallback() in MLX's backend/cuda and backend/metal,
// scaled_dot_product_attention.cpp.
#pragma once

#include <algorithm>

#include "call.h"

namespace flashattn {

// Whether MLX's own attention gets this call's mask as an array of L*S elements.
inline bool mlx_reads_an_array_mask(const Call& call) {
  return call.params.window > 0 || call.has(Input::key_start) || call.has(Input::key_stop);
}

namespace mlx_fused {

template <typename... Sizes>
bool is_one_of(int size, Sizes... sizes) {
  return ((size == sizes) || ...);
}

inline bool on_cuda(const Call& call, bool is_causal, bool has_array) {
  const AttentionParams& p = call.params;
  if (has_array) return false;                                 // MLX writes the mask to memory, once per head
  if (is_causal && p.query_len > p.key_len) return false;      // the first rows see nothing
  if (call.is_traced && p.query_len % 128 != 0) return false;  // the gradient writes the score matrix
  // cuDNN. For one query, MLX uses it only over slices of a cache of fixed size, which mlx-lm does not have.
  bool cudnn = p.query_len > 1 && call.dtype != Dtype::float32 && p.head_dim % 8 == 0 && p.value_dim % 8 == 0 &&
               std::max(p.head_dim, p.value_dim) <= 128;
  bool vector = p.query_len < 4 && p.head_dim == p.value_dim && is_one_of(p.head_dim, 64, 96, 128);
  return cudnn || vector;
}

// Under mx.grad MLX's own attention on Metal is never fused. A traced call may be under mx.grad.
inline bool on_metal(const Call& call, bool is_causal, bool has_array) {
  const AttentionParams& p = call.params;
  bool is_square = p.head_dim == p.value_dim;
  if (call.is_traced) return false;
  if (p.query_len > 8) {
    return is_square && is_one_of(p.head_dim, 64, 72, 80, 96, 128) &&
           (!is_causal || has_array || p.query_len <= p.key_len);
  }
  bool fits = (is_square && is_one_of(p.head_dim, 64, 96, 128, 256)) || (p.head_dim == 192 && p.value_dim == 128);
  return fits && p.query_len <= p.key_len && p.query_len * (p.num_heads / p.num_kv_heads) <= 32;
}

}  // namespace mlx_fused

inline bool mlx_is_fused(const Call& call, Backend backend) {
  const AttentionParams& p = call.params;
  bool unknown_to_mlx = p.softcap != 0 || p.bits != 0 || call.has(Input::tree) || call.has(Input::alibi_slopes);
  // Our kernel skips what such a mask hides. How much that is, is not known here.
  bool array_of_caller = call.has(Input::visible) || call.has(Input::bias);
  if (backend == Backend::cpu || unknown_to_mlx || array_of_caller || p.batch_dims != 1 || p.num_kv_heads == 0) {
    return false;
  }
  bool has_array = mlx_reads_an_array_mask(call), is_causal = p.causal && !has_array;
  return backend == Backend::cuda ? mlx_fused::on_cuda(call, is_causal, has_array)
                                  : mlx_fused::on_metal(call, is_causal, has_array);
}

}  // namespace flashattn
