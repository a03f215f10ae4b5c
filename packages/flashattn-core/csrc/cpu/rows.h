// Prepares the rows of a block: loads their queries and the spans of keys that they see. Turns products of queries and
// keys into logits. The forward and the backward pass use this file.
#pragma once

#include "dtype.h"
#include "forward.h"
#include "masked_scores.h"
#include "matmul.h"
#include "scratch.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Calls visit(T{}). T is the storage type for `dtype`.
template <typename Visit>
FLASHATTN_INLINE void with_dtype(Dtype dtype, Visit visit) {
  switch (dtype) {
    case Dtype::float32: return visit(float{});
    case Dtype::float16: return visit(half_t{});
    case Dtype::bfloat16: return visit(bfloat_t{});
  }
}

// Row r of a block. The heads of one query are adjacent, so that neighbouring rows see nearly the same keys.
struct Row {
  int head, query;
};
FLASHATTN_INLINE Row row_of(const RowBlock& block, int r) {
  return {block.head_begin + r % block.head_count, block.query_begin + r / block.head_count};
}

// Returns the heads and queries of `count` rows of a block, from row `first` on.
FLASHATTN_INLINE QueryRows query_rows(const RowBlock& block, int first, int count) {
  return {
      block.batch,
      {block.head_begin, block.head_begin + block.head_count},
      {block.query_begin + first / block.head_count, block.query_begin + (first + count - 1) / block.head_count + 1}};
}

FLASHATTN_INLINE int kv_head_of(const AttentionArgs& args, const RowBlock& block) {
  int group = args.params.num_heads / args.params.num_kv_heads;
  // group is 0 if the call has no query heads. The backward pass still loads keys then, and writes gradients of 0.
  return block.head_begin / larger(1, group);
}

// Returns a pointer to the row of key `first` in `data`, in the block's batch element and key/value head.
template <typename T>
static inline const T* key_row(const AttentionArgs& args, const RowBlock& block, const void* data,
                               const Strides& strides, int first) {
  return static_cast<const T*>(data) + batch_offset(args.params, strides, block.batch) +
         kv_head_of(args, block) * strides.head + first * strides.row;
}

// Packs source(0) to source(columns - 1), times `factor`, as columns of a right operand (depth, columns).
template <typename T, typename Source>
static inline void pack_transposed(float* packed, Source source, int64_t column_stride, int depth, int columns,
                                   float factor) {
  for (int r = 0; r < columns; r += kWidth) {
    const T* rows[kWidth];
    for (int i = 0; i < kWidth; ++i) rows[i] = source(r + i);
    for (int d = 0; d < depth; d += kWidth) {
      vfloat tile[kWidth];
      for (int i = 0; i < kWidth; ++i) tile[i] = load_part(rows[i], column_stride, d, depth) * factor;
      transpose(tile);
      for (int k = 0; k < smaller(kWidth, depth - d); ++k) {
        store(packed + packed_index(d + k, r, depth, columns), tile[k]);
      }
    }
  }
}

// Loads the block's queries, times `factor`, into scratch.query.
template <typename T>
static inline void load_queries(Scratch& scratch, const AttentionArgs& args, const RowBlock& block, float factor) {
  const AttentionParams& p = args.params;
  const T* query = static_cast<const T*>(args.query) + batch_offset(p, p.query, block.batch);
  const auto source = [&](int r) {
    Row row = row_of(block, r < block.rows() ? r : 0);  // padding repeats the first row
    return query + row.head * p.query.head + row.query * p.query.row;
  };
  if (scratch.few_rows) {
    for (int r = 0; r < block.rows(); ++r) {
      for (int d = 0; d < scratch.depth; d += kWidth) {
        store(scratch.query + r * scratch.depth + d, load_part(source(r), p.query.column, d, p.head_dim) * factor);
      }
    }
    return;
  }
  pack_transposed<T>(scratch.query, source, p.query.column, p.head_dim, scratch.padded_rows, factor);
}

FLASHATTN_INLINE bool caps(const AttentionParams& p) {
  return p.softcap > 0;
}

// Writes the derivative of softcap at `products` to `slopes`, before finish_scores() overwrites the products.
FLASHATTN_INLINE void cap_slopes(const float* products, const AttentionParams& p, float* slopes, int64_t count) {
  for (int64_t i = 0; i < count; i += kWidth) {
    vfloat t = tanh(load(products + i) * (1 / p.softcap));
    store(slopes + i, 1.0f - t * t);
  }
}

// Whether finish_scores() changes the scores of visible keys by softcap or ALiBi.
FLASHATTN_INLINE bool changes_scores(const AttentionArgs& args) {
  return caps(args.params) || args.alibi_slopes;
}

// Prepares a block's rows for the first tile: sets sums, spans, positions, slopes and bands, and loads the queries.
static inline void load_rows(Scratch& scratch, const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  const auto set = [&](int r, Span seen, int position, float slope) {
    scratch.row_max[r] = -kInfinity;
    scratch.row_sum[r] = 0;
    scratch.seen_begin[r] = seen.begin;
    scratch.seen_end[r] = seen.end;
    scratch.position[r] = position;
    scratch.slope[r] = slope;
    scratch.next_key[r] = r / scratch.padded_rows;
  };
  KeyRange range = key_range(args, block.batch);
  for (int r = 0, i = 0; i < block.query_count; ++i) {
    int query = block.query_begin + i;
    Span seen = seen_span(p, range, query);
    for (int h = 0; h < block.head_count; ++h, ++r) {
      float slope = 0;
      if (args.alibi_slopes) {
        const Strides& strides = p.alibi_slopes;
        slope = args.alibi_slopes[batch_offset(p, strides, block.batch) + (block.head_begin + h) * strides.head];
      }
      set(r, seen, query + p.key_len - p.query_len, slope);
    }
  }
  // Padding rows are computed like the block's rows, but they are never stored.
  for (int r = block.rows(); r < scratch.padded_rows; ++r) set(r, {0, p.key_len}, 0, 0);
  for (int lane = scratch.padded_rows; lane < kWidth; ++lane) {
    int r = lane - scratch.padded_rows;
    set(lane, {scratch.seen_begin[r], scratch.seen_end[r]}, scratch.position[r], scratch.slope[r]);
  }
  scratch.band_count = 0;
  for (int first = 0; first < block.rows(); first += kBandRows) {
    Band band = {first,
                 smaller(kBandRows, block.rows() - first),
                 smaller(kBandRows, scratch.padded_rows - first),
                 {p.key_len, 0},
                 {0, p.key_len}};
    for (int r = first; r < first + band.rows; ++r) {
      Span seen = {scratch.seen_begin[r], scratch.seen_end[r]};
      if (seen.begin < seen.end) {
        band.any = {smaller(band.any.begin, seen.begin), larger(band.any.end, seen.end)};
      }
      band.all = {larger(band.all.begin, seen.begin), smaller(band.all.end, seen.end)};
    }
    scratch.bands[scratch.band_count++] = band;
  }
  __builtin_memset(scratch.output, 0, sizeof(float) * block.rows() * scratch.value_columns);

  // Queries are multiplied by scale, which is often a power of two, so that the product is exact. They are not divided
  // by softcap, because the division would usually round.
  with_dtype(args.dtype, [&](auto type) { load_queries<decltype(type)>(scratch, args, block, p.scale); });
}

// Applies the array masks to the scores of a band. `first` is the index of the key that the first scores belong to.
static inline void add_arrays(Scratch& scratch, const AttentionArgs& args, const RowBlock& block, const Band& band,
                              int first, Span keys) {
  const auto row_at = [&](int r) {
    Row row = row_of(block, smaller(r, block.rows() - 1));  // padding repeats the last row
    return array_row(args, block.batch, row.head, row.query);
  };
  if (band.padded_rows % kWidth != 0) {
    for (int r = 0; r < band.rows; ++r) {
      add_arrays_to_row(args, row_at(band.first + r), keys, {scratch.scores + r, band.padded_rows, first});
    }
    return;
  }
  // Array masks have the shape (rows, keys), but scores have the shape (keys, rows). So tiles of the masks are
  // transposed in registers.
  for (int lane = 0; lane < band.padded_rows; lane += kWidth) {
    ArrayRow rows[kWidth];
    for (int i = 0; i < kWidth; ++i) rows[i] = row_at(band.first + lane + i);
    for (int j = keys.begin / kWidth * kWidth; j < keys.end; j += kWidth) {
      vfloat added[kWidth];
      for (int i = 0; i < kWidth; ++i) added[i] = added_by_arrays(args, rows[i], j);
      transpose(added);
      for (int key = larger(j, keys.begin); key < smaller(j + kWidth, keys.end); ++key) {
        float* scores = scratch.scores + int64_t{key - first} * band.padded_rows + lane;
        vfloat sum = load(scores) + added[key - j], hidden = broadcast(-kInfinity);
        store(scores, added[key - j] == hidden ? hidden : sum);
      }
    }
  }
}

// Turns scores, which are q·k * scale, into logits: applies softcap, ALiBi and masks. The logit of a hidden key is
// -inf.
static inline void finish_scores(Scratch& scratch, const AttentionArgs& args, const RowBlock& block, const Band& band,
                                 Span keys) {
  const AttentionParams& p = args.params;
  const auto for_each_vector = [&](auto visit) {
    for (int j = keys.begin; j < keys.end; j += band.keys()) {
      for (int lane = 0; lane < band.lanes(); lane += kWidth) {
        float* scores = scratch.scores + (j - keys.begin) * band.padded_rows + lane;
        int row = band.first + lane;
        store(scores, visit(load(scores), row, load(scratch.next_key + row) + j));
      }
    }
  };
  if (caps(p)) {
    for_each_vector([&](vfloat scores, int, vint) { return tanh(scores * (1 / p.softcap)) * p.softcap; });
  }
  if (args.alibi_slopes) {
    for_each_vector([&](vfloat scores, int row, vint key) {
      vint distance = load(scratch.position + row) - key;
      distance = distance < 0 ? -distance : distance;
      return scores - load(scratch.slope + row) * to_float(distance);
    });
  }
  if (args.tree) {
    for (int r = band.first; r < band.first + band.rows; ++r) {
      Span seen = {larger(scratch.seen_begin[r], keys.begin), smaller(scratch.seen_end[r], keys.end)};
      hide_by_tree(args, block.batch, row_of(block, r).query, seen,
                   {scratch.scores + r - band.first, band.padded_rows, keys.begin});
    }
  }
  if (args.bias || args.visible) {
    QueryRows rows = query_rows(block, band.first, band.rows);
    const auto changes = [&](int key) {
      return (block_of(args, rows, key / kBlockSize, block.decoded) & kBlockChanges) != 0;
    };
    const auto next_block = [&](int key) { return smaller((key / kBlockSize + 1) * kBlockSize, keys.end); };
    for (int end, begin = keys.begin; begin < keys.end; begin = end) {  // joins adjacent blocks that change scores
      end = next_block(begin);
      if (!changes(begin)) continue;
      while (end < keys.end && changes(end)) end = next_block(end);
      add_arrays(scratch, args, block, band, keys.begin, {begin, end});
    }
  }
  bool hidden_by_span = band.all.begin > keys.begin || band.all.end < keys.end;
  if (!hidden_by_span) return;
  for_each_vector([&](vfloat scores, int row, vint key) {
    vint seen = (load(scratch.seen_begin + row) <= key) & (load(scratch.seen_end + row) > key);
    return seen ? scores : broadcast(-kInfinity);
  });
}

// Whether all rows of the band see all of `keys`, and array masks change none of their scores.
static inline bool sees_all(const AttentionArgs& args, const RowBlock& block, const Band& band, Span keys) {
  int tree_begin = args.tree ? args.params.key_len - args.params.tree_size : args.params.key_len;
  if (band.all.begin > keys.begin || keys.end > smaller(band.all.end, tree_begin)) return false;
  if (!args.visible && !args.bias) return true;
  QueryRows rows = query_rows(block, band.first, band.rows);
  for (int i = keys.begin / kBlockSize; i * kBlockSize < keys.end; ++i) {
    if (block_of(args, rows, i, block.decoded) & kBlockChanges) return false;
  }
  return true;
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
