// FlashAttention-2's forward pass for a block of rows (Dao 2023, arXiv:2307.08691, algorithm 1): keys and
// values go by in tiles; each row keeps its maximum so far, its sum so far and its unnormalised output.
//
// Scores are kept transposed, (keys, rows): the softmax then works on a vector of rows at a time, with no
// sums across a vector, and neither keys nor probabilities are ever transposed. Only the queries are, once
// for all tiles. No L x S array exists at any time.
//
// Compiled once per instruction set, see simd.h.
#include "kernels.h"

#include <cstdlib>
#include <new>

#include "attention.h"
#include "dtype.h"
#include "matmul.h"
#include "simd.h"
#include "visibility.h"

namespace flashattn::cpu::FLASHATTN_ISA {
namespace {

constexpr int kKeyTile = 96;  // a multiple of kRows: no narrower register tile is needed but at the end

constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// One thread's working memory, kept for its next block.
struct Scratch {
  float* memory = nullptr;
  int64_t capacity = 0;

  // What the block at hand uses of it.
  int columns;        // of scores: the block's rows, padded to whole vectors
  int value_columns;  // value_dim, padded to whole vectors
  float* query;       // packed (head_dim, columns), times scale
  float* key;         // (kKeyTile, head_dim)
  float* value;       // packed (kKeyTile, value_columns)
  float* scores;      // (kKeyTile, columns), then the probabilities
  float* output;      // (rows, value_columns), unnormalised
  // One number a row:
  float row_max[kMaxRows];  // -inf: nothing seen yet
  float row_sum[kMaxRows];
  float rescale[kMaxRows];                           // exp(old row_max - new row_max)
  float slope[kMaxRows];                             // ALiBi's
  int32_t position[kMaxRows];                        // of the query among the keys
  int32_t seen_begin[kMaxRows], seen_end[kMaxRows];  // the interval of keys that the row sees

  void prepare(int rows, int head_dim, int value_dim) {
    columns = round_up(rows, kWidth);
    value_columns = round_up(value_dim, kWidth);
    struct Part {
      float** start;
      int64_t size;
    };
    const Part parts[] = {{&query, int64_t{head_dim} * columns},
                          {&key, int64_t{kKeyTile} * head_dim},
                          {&value, int64_t{kKeyTile} * value_columns},
                          {&scores, int64_t{kKeyTile} * columns},
                          {&output, int64_t{rows} * value_columns}};
    constexpr int64_t kLine = 16;  // each part begins on a cache line
    int64_t total = 0;
    for (const Part& part : parts) total += (part.size + kLine - 1) / kLine * kLine;
    if (total > capacity) {
      std::free(memory);
      memory = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(total) * sizeof(float)));
      capacity = memory ? total : 0;
      if (!memory) {
        throw std::bad_alloc();
      }
    }
    float* next = memory;
    for (const Part& part : parts) {
      *part.start = next;
      next += (part.size + kLine - 1) / kLine * kLine;
    }
  }

  ~Scratch() { std::free(memory); }
};

thread_local Scratch scratch;

// Calls visit(T{}) with the storage type of query, key, value and out.
template <typename Visit>
FLASHATTN_INLINE void with_dtype(Dtype dtype, Visit visit) {
  switch (dtype) {
    case Dtype::float32: return visit(float{});
    case Dtype::float16: return visit(half_t{});
    case Dtype::bfloat16: return visit(bfloat_t{});
  }
}

// Row r of a block is query `query_begin + r % query_count` of head `head_begin + r / query_count`.
struct Row {
  int head, query;
};
FLASHATTN_INLINE Row row_of(const RowBlock& block, int r) {
  return {block.head_begin + r / block.query_count, block.query_begin + r % block.query_count};
}

// Everything that stays the same for all the tiles of a block.
void load_rows(const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  for (int r = 0; r < scratch.columns; ++r) {
    bool real = r < block.rows();  // the others are padding: computed along, never stored
    Row row = real ? row_of(block, r) : Row{};
    Interval seen = real ? visible_keys(args, block.batch, row.query) : Interval{0, p.key_len};
    scratch.row_max[r] = -kInfinity;
    scratch.row_sum[r] = 0;
    scratch.seen_begin[r] = seen.begin;
    scratch.seen_end[r] = seen.end;
    scratch.position[r] = row.query + p.key_len - p.query_len;
    scratch.slope[r] = 0;
    if (args.alibi_slopes && real) {
      const Strides& strides = p.alibi_slopes;
      scratch.slope[r] = args.alibi_slopes[batch_offset(p, strides, block.batch) + row.head * strides.head];
    }
  }
  for (int64_t i = 0; i < int64_t{block.rows()} * scratch.value_columns; ++i) scratch.output[i] = 0;

  // Scores leave the product as what softcap's tanh, or the softmax, is applied to.
  float factor = p.softcap > 0 ? p.scale / p.softcap : p.scale;
  with_dtype(args.dtype, [&](auto type) {
    const auto* query = static_cast<const decltype(type)*>(args.query) + batch_offset(p, p.query, block.batch);
    for (int r = 0; r < scratch.columns; ++r) {
      Row row = r < block.rows() ? row_of(block, r) : row_of(block, 0);
      const auto* source = query + row.head * p.query.head + row.query * p.query.row;
      for (int d = 0; d < p.head_dim; ++d) {
        scratch.query[packed_index(d, r, p.head_dim, scratch.columns)] = to_float(source[d * p.query.column]) * factor;
      }
    }
  });
}

FLASHATTN_INLINE int kv_head_of(const AttentionArgs& args, const RowBlock& block) {
  return block.head_begin / (args.params.num_heads / args.params.num_kv_heads);
}

// The tile's keys as the product's left operand: where they lie, if they are floats and read only once;
// otherwise converted and side by side.
Left load_keys(const AttentionArgs& args, const RowBlock& block, int first, int count) {
  const AttentionParams& p = args.params;
  int64_t offset = batch_offset(p, p.key, block.batch) + kv_head_of(args, block) * p.key.head + first * p.key.row;
  if (args.dtype == Dtype::float32 && scratch.columns <= kColumns * kWidth) {
    return {static_cast<const float*>(args.key) + offset, p.key.row, p.key.column};
  }
  with_dtype(args.dtype, [&](auto type) {
    const auto* key = static_cast<const decltype(type)*>(args.key) + offset;
    for (int j = 0; j < count; ++j) {
      const auto* source = key + j * p.key.row;
      float* target = scratch.key + int64_t{j} * p.head_dim;
      if (p.key.column == 1) {
        for (int d = 0; d < p.head_dim; ++d) target[d] = to_float(source[d]);
      } else {
        for (int d = 0; d < p.head_dim; ++d) target[d] = to_float(source[d * p.key.column]);
      }
    }
  });
  return {scratch.key, p.head_dim, 1};
}

// Packs the tile's values, with 0 in place of NaN and infinity: those must not reach a row that does not see
// them, through 0 * NaN. Returns whether there were none.
bool pack_values(const AttentionArgs& args, const RowBlock& block, int first, int count) {
  const AttentionParams& p = args.params;
  constexpr int kPanel = kColumns * kWidth;
  constexpr uint32_t kExponent = 0x7f800000u;
  bool all_finite = true;
  with_dtype(args.dtype, [&](auto type) {
    const auto* value = static_cast<const decltype(type)*>(args.value) + batch_offset(p, p.value, block.batch) +
                        kv_head_of(args, block) * p.value.head + first * p.value.row;
    for (int j = 0; j < count; ++j) {
      const auto* source = value + j * p.value.row;
      for (int column = 0; column < scratch.value_columns; column += kPanel) {
        float* target = scratch.value + packed_index(j, column, count, scratch.value_columns);
        int width = smaller(kPanel, scratch.value_columns - column);
        int filled = smaller(width, p.value_dim - column);
        if (p.value.column == 1) {
          for (int c = 0; c < filled; ++c) target[c] = to_float(source[column + c]);
        } else {
          for (int c = 0; c < filled; ++c) target[c] = to_float(source[(column + c) * p.value.column]);
        }
        for (int c = filled; c < width; ++c) target[c] = 0;
        for (int c = 0; c < width; ++c) {
          bool finite = (to_bits(target[c]) & kExponent) != kExponent;
          all_finite &= finite;
          target[c] = finite ? target[c] : 0;
        }
      }
    }
  });
  return all_finite;
}

// Softcap, ALiBi, masks. In: q·k * scale (/ softcap). Out: the logits; -inf where a row does not see a key.
void finish_scores(const AttentionArgs& args, const RowBlock& block, int first, int count) {
  const AttentionParams& p = args.params;
  int columns = scratch.columns;
  if (p.softcap > 0) {
    for (int i = 0; i < count * columns; i += kWidth) {
      store(scratch.scores + i, tanh(load(scratch.scores + i)) * p.softcap);
    }
  }
  if (args.alibi_slopes) {
    for (int j = 0; j < count; ++j) {
      for (int r = 0; r < columns; r += kWidth) {
        float* scores = scratch.scores + j * columns + r;
        vint distance = load(scratch.position + r) - (first + j);
        distance = distance < 0 ? -distance : distance;
        store(scores, load(scores) - load(scratch.slope + r) * to_float(distance));
      }
    }
  }
  if (args.bias || args.visible || args.tree) {
    for (int r = 0; r < block.rows(); ++r) {
      Row row = row_of(block, r);
      Interval tile_keys = {larger(scratch.seen_begin[r], first), smaller(scratch.seen_end[r], first + count)};
      Scores scores = {scratch.scores + r, columns, first};
      if (args.bias && tile_keys.begin < tile_keys.end) {
        add_bias(args, block.batch, row.head, row.query, tile_keys, scores);
      }
      hide_unseen(args, block.batch, row.head, row.query, tile_keys, scores);
    }
  }
  for (int j = 0; j < count; ++j) {
    for (int r = 0; r < columns; r += kWidth) {
      float* scores = scratch.scores + j * columns + r;
      vint seen = (load(scratch.seen_begin + r) <= first + j) & (load(scratch.seen_end + r) > first + j);
      store(scores, seen ? load(scores) : broadcast(-kInfinity));
    }
  }
}

// What to subtract before exponentiating. Where nothing is visible yet, any finite number gives
// exp(-inf) = 0; -inf - -inf would give NaN.
FLASHATTN_INLINE vfloat finite_reference(vfloat row_max) {
  return row_max == broadcast(-kInfinity) ? broadcast(0) : row_max;
}

// The online softmax, a vector of rows at a time: logits become probabilities relative to the new row_max.
// The difference comes first, then the change of base: logits as low as -FLT_MAX, which some use to hide,
// must not overflow.
void online_softmax(int count) {
  int columns = scratch.columns;
  for (int r = 0; r < columns; r += kWidth) {
    float* scores = scratch.scores + r;
    vfloat old_max = load(scratch.row_max + r);
    vfloat new_max = old_max;
    for (int j = 0; j < count; ++j) new_max = vmax(new_max, load(scores + j * columns));
    vfloat reference = finite_reference(new_max);
    vfloat rescale = exp2((old_max - reference) * kLog2e);
    vfloat sum = {};  // of this tile alone: small numbers are not lost beside the large sum so far
    for (int j = 0; j < count; ++j) {
      vfloat probability = exp2((load(scores + j * columns) - reference) * kLog2e);
      store(scores + j * columns, probability);
      sum += probability;
    }
    store(scratch.row_max + r, new_max);
    store(scratch.row_sum + r, load(scratch.row_sum + r) * rescale + sum);
    store(scratch.rescale + r, rescale);
  }
}

// Adds what pack_values() left out: NaN and infinity, to the rows that see their keys. `seen` is (count, columns).
void add_not_finite(const AttentionArgs& args, const RowBlock& block, int first, int count, const bool* seen) {
  const AttentionParams& p = args.params;
  with_dtype(args.dtype, [&](auto type) {
    const auto* value = static_cast<const decltype(type)*>(args.value) + batch_offset(p, p.value, block.batch) +
                        kv_head_of(args, block) * p.value.head + first * p.value.row;
    for (int j = 0; j < count; ++j) {
      for (int c = 0; c < p.value_dim; ++c) {
        float x = to_float(value[j * p.value.row + c * p.value.column]);
        if (x - x == 0) continue;
        for (int r = 0; r < block.rows(); ++r) {
          if (seen[j * scratch.columns + r]) {
            scratch.output[int64_t{r} * scratch.value_columns + c] += scratch.scores[j * scratch.columns + r] * x;
          }
        }
      }
    }
  });
}

void attend_tile(const AttentionArgs& args, const RowBlock& block, int first, int count, bool all_visible) {
  Left keys = load_keys(args, block, first, count);
  bool finite = pack_values(args, block, first, count);
  multiply(keys, scratch.query, count, args.params.head_dim, scratch.columns,
           {scratch.scores, scratch.columns, nullptr});
  if (!all_visible) {
    finish_scores(args, block, first, count);
  }
  bool seen[kKeyTile * kMaxRows];
  if (!finite) {
    for (int i = 0; i < count * scratch.columns; ++i) seen[i] = scratch.scores[i] != -kInfinity;
  }
  online_softmax(count);
  multiply({scratch.scores, 1, scratch.columns}, scratch.value, block.rows(), count, scratch.value_columns,
           {scratch.output, scratch.value_columns, scratch.rescale});
  if (!finite) {
    add_not_finite(args, block, first, count, seen);
  }
}

// Leaves row_max, row_sum and output of the block's rows in scratch.
void attend_rows(const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  scratch.prepare(block.rows(), p.head_dim, p.value_dim);
  load_rows(args, block);

  // Keys outside of every row's interval are never touched; a tile inside of all of them needs no mask.
  Interval any = {p.key_len, 0}, all = {0, p.key_len};
  for (int i = 0; i < block.query_count; ++i) {
    Interval seen = visible_keys(args, block.batch, block.query_begin + i);
    if (seen.begin < seen.end) {
      any = {smaller(any.begin, seen.begin), larger(any.end, seen.end)};
    }
    all = {larger(all.begin, seen.begin), smaller(all.end, seen.end)};
  }
  int begin = larger(any.begin, block.key_begin), end = smaller(any.end, block.key_end);
  bool plain_scores = p.softcap == 0 && !args.alibi_slopes && !args.bias && !args.visible;
  int tree_begin = args.tree ? p.key_len - p.tree_size : p.key_len;
  for (int first = begin; first < end; first += kKeyTile) {
    int count = smaller(kKeyTile, end - first);
    bool all_visible = plain_scores && all.begin <= first && first + count <= smaller(all.end, tree_begin);
    attend_tile(args, block, first, count, all_visible);
  }
}

// Divides by the sum, sinks included, and writes out and lse.
void finish_rows(const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    T* out = static_cast<T*>(args.out) + batch_offset(p, p.out, block.batch);
    float* lse = args.lse + batch_offset(p, p.lse, block.batch);
    for (int r = 0; r < block.rows(); ++r) {
      Row row = row_of(block, r);
      float row_max = scratch.row_max[r], row_sum = scratch.row_sum[r];
      bool saw_nothing = row_sum == 0;  // the largest visible score adds 1, and NaN is not 0
      float output_scale = 1;
      if (args.sinks && !saw_nothing) {
        const Strides& strides = p.sinks;
        float sink = args.sinks[batch_offset(p, strides, block.batch) + row.head * strides.head];
        float with_sink = larger(row_max, sink);
        output_scale = exp2((row_max - with_sink) * kLog2e);
        row_sum = row_sum * output_scale + exp2((sink - with_sink) * kLog2e);
        row_max = with_sink;
      }
      float normalise = saw_nothing ? 0.0f : output_scale / row_sum;
      const float* output = scratch.output + int64_t{r} * scratch.value_columns;
      T* target = out + row.head * p.out.head + row.query * p.out.row;
      for (int c = 0; c < p.value_dim; ++c) from_float(output[c] * normalise, &target[c * p.out.column]);
      lse[row.head * p.lse.head + row.query * p.lse.row] = saw_nothing ? -kInfinity : row_max + __builtin_logf(row_sum);
    }
  });
}

void attend(const AttentionArgs& args, const RowBlock& block) {
  attend_rows(args, block);
  finish_rows(args, block);
}

void attend_partial(const AttentionArgs& args, const RowBlock& block, float* partial) {
  attend_rows(args, block);
  int value_dim = args.params.value_dim;
  for (int r = 0; r < block.rows(); ++r, partial += partial_row_size(value_dim)) {
    partial[0] = scratch.row_max[r];
    partial[1] = scratch.row_sum[r];
    const float* output = scratch.output + int64_t{r} * scratch.value_columns;
    for (int c = 0; c < value_dim; ++c) partial[2 + c] = output[c];
  }
}

void merge(const AttentionArgs& args, const RowBlock& block, const float* partials, int64_t count,
           int64_t partial_stride) {
  int value_dim = args.params.value_dim;
  scratch.prepare(block.rows(), args.params.head_dim, value_dim);
  for (int r = 0; r < block.rows(); ++r) {
    const float* first = partials + r * partial_row_size(value_dim);
    float row_max = -kInfinity, row_sum = 0;
    for (int64_t i = 0; i < count; ++i) row_max = larger(row_max, first[i * partial_stride]);
    float reference = row_max == -kInfinity ? 0.0f : row_max;
    float* output = scratch.output + int64_t{r} * scratch.value_columns;
    for (int c = 0; c < value_dim; ++c) output[c] = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float* partial = first + i * partial_stride;
      float weight = exp2((partial[0] - reference) * kLog2e);
      row_sum += partial[1] * weight;
      for (int c = 0; c < value_dim; ++c) output[c] += partial[2 + c] * weight;
    }
    scratch.row_max[r] = row_max;
    scratch.row_sum[r] = row_sum;
  }
  finish_rows(args, block);
}

}  // namespace

const Kernels kernels = {FLASHATTN_ISA_NAME, attend, attend_partial, merge, roofline_loops};

}  // namespace flashattn::cpu::FLASHATTN_ISA
