// The one plain struct that every backend reads: shapes, strides and options of one attention call.
// No pointers and no standard library in here, so that host C++ and kernels can include the same file.
#pragma once

#ifndef __METAL_VERSION__  // Metal has these types without an include
#include <cstdint>
#endif

namespace flashattn {

// Leading batch dimensions of one call; mx.vmap adds one each time it is nested.
enum : int { kMaxBatchDims = 8 };

// Positions of a tensor's elements, in elements. A dimension that is broadcast, or of size 1, has stride 0, so masks
// are read in place and never expanded.
struct Strides {
  int64_t batch[kMaxBatchDims];
  int64_t head;
  int64_t row;     // query position or key position
  int64_t column;  // head_dim, or key position in masks
};

struct AttentionParams {
  int32_t batch_dims;
  int32_t batch_shape[kMaxBatchDims];
  int64_t batch_size;  // product of batch_shape

  int32_t num_heads;     // H_q
  int32_t num_kv_heads;  // H_kv, divides H_q
  int32_t query_len;     // L
  int32_t key_len;       // S
  int32_t head_dim;      // D
  int32_t value_dim;     // D_v

  float scale;
  float softcap;      // 0: none
  bool causal;        // lower-right aligned: j <= i + S - L
  int32_t window;     // 0: none; otherwise i + S - L - j < window
  int32_t tree_size;  // T, the number of last keys that tree bits describe; 0: none

  Strides query, key, value, out, lse;
  Strides visible, bias;        // (*B, H_q, L, S)
  Strides key_start, key_stop;  // (*B): batch strides only
  Strides tree;                 // (*B, T, words): batch, row and column strides
  Strides sinks, alibi_slopes;  // (*B, H_q): batch and head strides
};

// Keys and values in MLX's affine quantisation: uint32 words along the columns, a scale and a bias for each group of
// columns. Strides of the words are AttentionParams' key and value.
struct QuantParams {
  int32_t bits;                                                // of an element; 0: keys and values are not quantised
  int32_t group_size;                                          // elements
  Strides key_scales, key_biases, value_scales, value_biases;  // (*B, H_kv, S, groups)
};

// How metal_decode_split cuts the keys: num_chunks times chunk_len keys, from first_key on.
struct SplitParams {
  int32_t first_key;  // no query sees a key before it
  int32_t chunk_len;
  int32_t num_chunks;
};

// Strides of what only the gradient has.
struct BackwardParams {
  Strides dout;
  Strides dlse;  // (*B, H_q, L); unused where there is none
  Strides dq, dk, dv;
};

}  // namespace flashattn
