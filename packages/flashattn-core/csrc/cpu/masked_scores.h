// Applies the masks that may hide any key within a row's span: tree bits, a bool array and an additive array. The span
// itself comes from the causal mask, the window and the key range. Also finds the keys that the bool array and the
// additive array leave visible to at least one row.
#pragma once

#include "../call/block_map.h"
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
  int first;  // the index of the key that data[0] belongs to

  float& operator[](int key) const { return data[int64_t{key - first} * stride]; }
};

// Sets a key's score to -inf if the tree hides the key. Adding -inf would not do, because the score may be NaN.
FLASHATTN_INLINE void hide_by_tree(const AttentionArgs& args, int64_t batch, int query, Span keys, Scores scores) {
  const AttentionParams& p = args.params;
  int tree_begin = p.key_len - p.tree_size;
  int node = query + p.tree_size - p.query_len;  // negative for queries before the tree, which see none of its keys
  const uint32_t* bits = node < 0 ? nullptr : args.tree + batch_offset(p, p.tree, batch) + node * p.tree.row;
  for (int j = larger(keys.begin, tree_begin); j < keys.end; ++j) {
    int other = j - tree_begin;
    bool sees = bits && (bits[other / 32 * p.tree.column] >> (other % 32) & 1);
    scores[j] = sees ? scores[j] : -kInfinity;
  }
}

// Pointers to key 0 in a row of the bool array and of the additive array. Null if the call does not have the array.
struct ArrayRow {
  const bool* visible;
  const void* bias;
};
static inline ArrayRow array_row(const AttentionArgs& args, int64_t batch, int head, int query) {
  const AttentionParams& p = args.params;
  const auto offset = [&](const Strides& strides) {
    return batch_offset(p, strides, batch) + head * strides.head + query * strides.row;
  };
  ArrayRow row = {nullptr, nullptr};
  if (args.visible) row.visible = args.visible + offset(p.visible);
  if (args.bias) row.bias = static_cast<const char*>(args.bias) + offset(p.bias) * size_of(args.bias_dtype);
  return row;
}

// Calls visit(row.bias), with the pointer converted to the type of the additive array's elements.
template <typename Visit>
FLASHATTN_INLINE void with_bias_row(const AttentionArgs& args, ArrayRow row, Visit visit) {
  switch (args.bias_dtype) {
    case Dtype::float32: return visit(static_cast<const float*>(row.bias));
    case Dtype::float16: return visit(static_cast<const half_t*>(row.bias));
    case Dtype::bfloat16: return visit(static_cast<const bfloat_t*>(row.bias));
  }
}

// Applies the array masks to a row of scores. An entry of -inf hides its key, whatever the score was.
static inline void add_arrays_to_row(const AttentionArgs& args, ArrayRow row, Span keys, Scores scores) {
  const AttentionParams& p = args.params;
  if (row.visible) {
    for (int j = keys.begin; j < keys.end; ++j) scores[j] = row.visible[j * p.visible.column] ? scores[j] : -kInfinity;
  }
  if (row.bias) {
    with_bias_row(args, row, [&](auto bias) {
      for (int j = keys.begin; j < keys.end; ++j) {
        float b = to_float(bias[j * p.bias.column]);
        scores[j] = b == -kInfinity ? -kInfinity : scores[j] + b;
      }
    });
  }
}

// Returns the terms that the array masks add to a row's scores for kWidth keys, from `key` on. The term of a hidden key
// is -inf. Lanes beyond the last key are 0 or -inf.
FLASHATTN_INLINE vfloat added_by_arrays(const AttentionArgs& args, ArrayRow row, int key) {
  const AttentionParams& p = args.params;
  vfloat added = {};
  if (row.bias) {
    with_bias_row(args, row, [&](auto bias) { added = load_part(bias, p.bias.column, key, p.key_len); });
  }
  if (row.visible) {
    vbyte visible;
    if (p.visible.column == 1 && key + kWidth <= p.key_len) {
      __builtin_memcpy(&visible, row.visible + key, sizeof(visible));
    } else {
      bool part[kWidth] = {};
      for (int j = key; j < smaller(key + kWidth, p.key_len); ++j) part[j - key] = row.visible[j * p.visible.column];
      __builtin_memcpy(&visible, part, sizeof(visible));
    }
    added = widen(visible) != 0 ? added : broadcast(-kInfinity);
  }
  return added;
}

// Calls visit(head, query) for each row. If all heads share the rows of the arrays, it visits only one head.
template <typename Visit>
FLASHATTN_INLINE void for_each_row(const AttentionArgs& args, const QueryRows& rows, Visit visit) {
  bool same_heads = args.params.visible.head == 0 && args.params.bias.head == 0;
  for (int head = rows.heads.begin; head < (same_heads ? rows.heads.begin + 1 : rows.heads.end); ++head) {
    for (int query = rows.queries.begin; query < rows.queries.end; ++query) visit(head, query);
  }
}

// Returns kBlockShows and kBlockChanges for some rows and a block of keys. A decode step does not read the block map,
// because the map combines 32 queries, and a query's result must not depend on other queries.
static inline int block_of(const AttentionArgs& args, const QueryRows& rows, int block, bool decoded) {
  if (!decoded) return mapped_block(args, rows, block);
  int first = block * kBlockSize, end = smaller(first + kBlockSize, args.params.key_len), found = 0;
  for_each_row(args, rows, [&](int head, int query) {
    ArrayRow row = array_row(args, rows.batch, head, query);
    for (int key = first; key < end; key += kWidth) {
      vfloat added = added_by_arrays(args, row, key);
      for (int i = 0; i < smaller(kWidth, end - key); ++i) {
        found |= (added[i] != -kInfinity ? kBlockShows : 0) | (added[i] != 0 ? kBlockChanges : 0);
      }
    }
  });
  return found;
}

// Returns the span from the first to the last of `keys` that the arrays leave visible to some row. `keys` lie in one
// block. The span is empty if no row sees any of them.
static inline Span visible_span(const AttentionArgs& args, const QueryRows& rows, Span keys) {
  int first = keys.begin / kBlockSize * kBlockSize;
  vint visible[kBlockSize / kWidth] = {};
  for_each_row(args, rows, [&](int head, int query) {
    ArrayRow row = array_row(args, rows.batch, head, query);
    for (int i = 0; i < kBlockSize / kWidth && first + i * kWidth < keys.end; ++i) {
      visible[i] |= added_by_arrays(args, row, first + i * kWidth) != -kInfinity;
    }
  });
  int32_t is_visible[kBlockSize];
  __builtin_memcpy(is_visible, visible, sizeof(visible));
  while (keys.begin < keys.end && !is_visible[keys.end - 1 - first]) --keys.end;
  while (keys.begin < keys.end && !is_visible[keys.begin - first]) ++keys.begin;
  return keys;
}

// Returns the span of `keys` to compute next, at most `most` keys. It begins with the first key that some row sees. It
// ends with a key that some row sees, before the next block that no row sees. It is empty if no row sees any key.
// Without array masks, and in prefill without a block map, no key is skipped.
static inline Span next_visible(const AttentionArgs& args, const QueryRows& rows, Span keys, int most, bool decoded) {
  bool skips = (args.visible || args.bias) && (args.block_map || decoded);
  if (!skips) return {keys.begin, smaller(keys.end, keys.begin + most)};
  const auto found_at = [&](int key) { return block_of(args, rows, key / kBlockSize, decoded); };
  const auto next_block = [](int key) { return (key / kBlockSize + 1) * kBlockSize; };
  // The map combines 32 queries. So kBlockShows may be set although `rows` see no key of the block.
  int begin = keys.begin;
  for (; begin < keys.end; begin = next_block(begin)) {
    int found = found_at(begin);
    if (!(found & kBlockShows)) continue;
    if (!(found & kBlockChanges)) break;
    Span block = {begin, smaller(next_block(begin), keys.end)}, visible = visible_span(args, rows, block);
    if (visible.begin < visible.end) {
      begin = visible.begin;
      break;
    }
  }
  if (begin >= keys.end) return {keys.end, keys.end};
  int limit = smaller(keys.end, begin + most), end = begin;
  while (end < limit && (found_at(end) & kBlockShows)) end = smaller(next_block(end), limit);
  while (found_at(end - 1) & kBlockChanges) {
    int block = (end - 1) / kBlockSize * kBlockSize;
    Span visible = visible_span(args, rows, {larger(block, begin), end});
    end = visible.begin < visible.end ? visible.end : block;
    if (visible.begin < visible.end) break;
  }
  return {begin, end};
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
