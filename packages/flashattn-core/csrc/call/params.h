// The plain structs that backends read: shapes, strides and options of one attention call. They hold no pointers and
// use no standard library, so that host C++ and kernels can include this file.
#pragma once

#if !defined(__METAL_VERSION__) && !defined(__CUDACC_RTC__)  // in kernels these types are built in
#include <cstdint>
#endif

#include "inputs.def"

namespace flashattn {

// The most batch dimensions that a call may have. Each nested mx.vmap adds one.
enum : int { kMaxBatchDims = 8 };

// The strides of an array, in elements. A dimension that is broadcast, or of size 1, has stride 0. So kernels read a
// broadcast mask without a copy of it.
struct Strides {
  int64_t column;  // along head_dim; in masks, along the keys
  int64_t row;     // along the queries or the keys
  int64_t head;
  int64_t batch[kMaxBatchDims];  // the last field, so that its unused entries are at the struct's end
};

#define FLASHATTN_OPTION_FIELD(type, name) type name;
#define FLASHATTN_STRIDES_FIELD(name, called, dtype, axes) Strides name;

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
  int32_t tree_size;     // T: the last T keys are the nodes of a tree; 0 if there is no tree

  float scale;
  FLASHATTN_OPTIONS(FLASHATTN_OPTION_FIELD)

  FLASHATTN_INPUTS(FLASHATTN_STRIDES_FIELD)
  Strides out, lse;   // (*B, H_q, L, D_v) and (*B, H_q, L)
  Strides row_stats;  // (*B, H_q, L, 2): each row's row_max and row_sum, for the gradient
};

#undef FLASHATTN_OPTION_FIELD
#undef FLASHATTN_STRIDES_FIELD

// How a kernel splits the keys into num_chunks chunks. Decode kernels read first_key and chunk_len. cuda_prefill reads
// whole_blocks.
struct SplitParams {
  int32_t first_key;  // where the first chunk begins; no query sees an earlier key
  int32_t chunk_len;  // keys per chunk
  int32_t num_chunks;
  int32_t whole_blocks;  // the first whole_blocks blocks of queries do not split their keys
};

// The shape of any array, and its strides in elements.
struct ArrayParams {
  int64_t count;  // number of elements
  int32_t ndim;
  int32_t shape[kMaxBatchDims + 3];
  int64_t strides[kMaxBatchDims + 3];
};

// Strides of the arrays that only the backward pass has.
struct BackwardParams {
  Strides dout;
  Strides dlse;  // (*B, H_q, L)
  Strides dq, dk, dv;
  int32_t block_heads = 0;  // on CUDA: the most query heads over which one block of threads sums dK and dV
};

}  // namespace flashattn
