// What hides keys, or adds to their scores, inside of the span that a query sees: tree bits, a bool array, an additive
// array.
#pragma once

#include "../call/spans.h"
#include "batch.h"
#include "dtype.h"
#include "forward.h"
#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// One row of a tile's scores.
struct Scores {
  float* data;
  int stride;
  int first;  // the key of data[0]

  float& operator[](int key) const { return data[int64_t{key - first} * stride]; }
};

// Hides, among the given keys, what tree bits and the bool array hide. Hiding overwrites: a NaN score in a
// hidden key is gone afterwards.
FLASHATTN_INLINE void hide_unseen(const AttentionArgs& args, int64_t batch, int head, int query, Span keys,
                                  Scores scores) {
  const AttentionParams& p = args.params;
  if (args.tree) {
    int tree_begin = p.key_len - p.tree_size;
    int node = query + p.tree_size - p.query_len;  // lower-right aligned; before the tree: sees none of it
    const uint32_t* bits = node < 0 ? nullptr : args.tree + batch_offset(p, p.tree, batch) + node * p.tree.row;
    for (int j = larger(keys.begin, tree_begin); j < keys.end; ++j) {
      int other = j - tree_begin;
      bool sees = bits && (bits[other / 32 * p.tree.column] >> (other % 32) & 1);
      scores[j] = sees ? scores[j] : -kInfinity;
    }
  }
  if (args.visible) {
    const bool* row = args.visible + batch_offset(p, p.visible, batch) + head * p.visible.head + query * p.visible.row;
    for (int j = keys.begin; j < keys.end; ++j) {
      scores[j] = row[j * p.visible.column] ? scores[j] : -kInfinity;
    }
  }
}

// Adds one row of the additive mask; -inf hides, whatever the score was.
template <typename T>
FLASHATTN_INLINE void add_bias_row(const T* bias, int64_t stride, Span keys, Scores scores) {
  for (int j = keys.begin; j < keys.end; ++j) {
    float b = to_float(bias[j * stride]);
    scores[j] = b == -kInfinity ? -kInfinity : scores[j] + b;
  }
}

FLASHATTN_INLINE void add_bias(const AttentionArgs& args, int64_t batch, int head, int query, Span keys,
                               Scores scores) {
  const Strides& strides = args.params.bias;
  int64_t offset = batch_offset(args.params, strides, batch) + head * strides.head + query * strides.row;
  switch (args.bias_dtype) {
    case Dtype::float32:
      return add_bias_row(static_cast<const float*>(args.bias) + offset, strides.column, keys, scores);
    case Dtype::float16:
      return add_bias_row(static_cast<const half_t*>(args.bias) + offset, strides.column, keys, scores);
    case Dtype::bfloat16:
      return add_bias_row(static_cast<const bfloat_t*>(args.bias) + offset, strides.column, keys, scores);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
