// FlashAttention-2's forward pass for a block of rows (Dao 2023, arXiv:2307.08691, algorithm 1): keys and
// values go by in tiles; each row keeps its maximum so far, its sum so far and its unnormalised output.
// Scores live in scratch memory of kMaxRows x kKeyTile; no L x S array exists at any time.
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

constexpr int kKeyTile = 64;  // also the bits of a word that says which keys of a tile a row sees

constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// One thread's working memory, kept for its next block.
struct Scratch {
  float* memory = nullptr;
  int64_t capacity = 0;

  // What the block at hand uses of it.
  float* query;    // (rows, head_dim), times scale
  float* key;      // packed (head_dim, kKeyTile)
  float* value;    // packed (kKeyTile, value_columns)
  float* scores;   // (rows, kKeyTile), then the probabilities
  float* output;   // (rows, value_columns), unnormalised
  float* row_max;  // -inf: nothing seen yet
  float* row_sum;
  float* rescale;     // exp(old row_max - new row_max)
  int value_columns;  // value_dim, padded to whole vectors

  void prepare(int rows, int head_dim, int value_dim) {
    value_columns = round_up(value_dim, kWidth);
    int64_t sizes[] = {int64_t{rows} * head_dim,
                       int64_t{head_dim} * kKeyTile,
                       int64_t{kKeyTile} * value_columns,
                       int64_t{rows} * kKeyTile,
                       int64_t{rows} * value_columns,
                       rows,
                       rows,
                       rows};
    float** parts[] = {&query, &key, &value, &scores, &output, &row_max, &row_sum, &rescale};
    int64_t total = 0;
    for (int64_t& size : sizes) {
      size = (size + 15) / 16 * 16;  // each part begins on a cache line
      total += size;
    }
    if (total > capacity) {
      std::free(memory);
      memory = static_cast<float*>(std::aligned_alloc(64, total * sizeof(float)));
      capacity = memory ? total : 0;
      if (!memory) {
        throw std::bad_alloc();
      }
    }
    float* part = memory;
    for (int i = 0; i < 8; ++i) {
      *parts[i] = part;
      part += sizes[i];
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

void load_queries(const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  // Scores leave the product as what softcap's tanh, or the softmax, is applied to.
  float factor = p.softcap > 0 ? p.scale / p.softcap : p.scale;
  with_dtype(args.dtype, [&](auto type) {
    const auto* query = static_cast<const decltype(type)*>(args.query) + batch_offset(p, p.query, block.batch);
    for (int r = 0; r < block.rows(); ++r) {
      Row row = row_of(block, r);
      const auto* source = query + row.head * p.query.head + row.query * p.query.row;
      float* target = scratch.query + int64_t{r} * p.head_dim;
      for (int d = 0; d < p.head_dim; ++d) target[d] = to_float(source[d * p.query.column]) * factor;
    }
  });
}

// Packs `count` keys and values from `first` on. Returns whether all the values are finite.
bool pack_tile(const AttentionArgs& args, const RowBlock& block, int first, int count) {
  const AttentionParams& p = args.params;
  int kv_head = block.head_begin / (p.num_heads / p.num_kv_heads);
  bool finite = true;
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    const T* key = static_cast<const T*>(args.key) + batch_offset(p, p.key, block.batch) + kv_head * p.key.head +
                   first * p.key.row;
    const T* value = static_cast<const T*>(args.value) + batch_offset(p, p.value, block.batch) +
                     kv_head * p.value.head + first * p.value.row;
    pack(key, p.key.column, p.key.row, p.head_dim, count, round_up(count, kWidth), scratch.key);
    finite = pack(value, p.value.row, p.value.column, count, p.value_dim, scratch.value_columns, scratch.value);
  });
  return finite;
}

// Softcap, ALiBi, additive mask and hiding, on one row of a tile's raw scores.
// In: q·k * scale (/ softcap). Out: the logits; -inf where the row does not see the key.
void finish_scores(const AttentionArgs& args, const RowBlock& block, Row row, int first, int count, float* scores) {
  const AttentionParams& p = args.params;
  int padded = round_up(count, kWidth);
  if (p.softcap > 0) {
    for (int j = 0; j < padded; j += kWidth) store(scores + j, tanh(load(scores + j)) * p.softcap);
  }
  if (args.alibi_slopes) {
    const Strides& strides = p.alibi_slopes;
    float slope = args.alibi_slopes[batch_offset(p, strides, block.batch) + row.head * strides.head];
    int diagonal = row.query + p.key_len - p.query_len;
    for (int j = 0; j < padded; ++j) {
      int distance = diagonal - (first + j);
      scores[j] -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
  }
  Interval seen = visible_keys(args, block.batch, row.query);
  Interval tile_keys = {larger(seen.begin, first), smaller(seen.end, first + count)};
  if (args.bias && tile_keys.begin < tile_keys.end) {
    add_bias(args, block.batch, row.head, row.query, first, tile_keys, scores);
  }
  for (int j = 0; j < smaller(count, tile_keys.begin - first); ++j) scores[j] = -kInfinity;
  for (int j = larger(0, tile_keys.end - first); j < padded; ++j) scores[j] = -kInfinity;
  hide_unseen(args, block.batch, row.head, row.query, first, tile_keys, scores);
}

// What to subtract before exponentiating. Where nothing is visible yet, any finite number gives
// exp(-inf) = 0; -inf - -inf would give NaN.
FLASHATTN_INLINE float finite_reference(float row_max) {
  return row_max == -kInfinity ? 0.0f : row_max;
}

// One row of a tile through the online softmax: logits become probabilities relative to the new row_max.
// The difference comes first, then the change of base: logits as low as -FLT_MAX, which some use to hide,
// must not overflow.
void online_softmax(int r, int padded, float* scores) {
  vfloat most = broadcast(-kInfinity);
  for (int j = 0; j < padded; j += kWidth) most = vmax(most, load(scores + j));
  float old_max = scratch.row_max[r];
  float new_max = larger(old_max, horizontal_max(most));
  float reference = finite_reference(new_max);
  float rescale = exp2((old_max - reference) * kLog2e);
  vfloat sum = {};
  for (int j = 0; j < padded; j += kWidth) {
    vfloat probability = exp2((load(scores + j) - reference) * kLog2e);
    store(scores + j, probability);
    sum += probability;
  }
  scratch.row_max[r] = new_max;
  scratch.row_sum[r] = scratch.row_sum[r] * rescale + horizontal_sum(sum);
  scratch.rescale[r] = rescale;
}

// P·V for a tile whose values hold NaN or infinity: only keys that a row sees may reach it.
void accumulate_seen(int rows, int count, const uint64_t* seen) {
  int columns = scratch.value_columns;
  for (int r = 0; r < rows; ++r) {
    float* output = scratch.output + int64_t{r} * columns;
    for (int c = 0; c < columns; ++c) output[c] *= scratch.rescale[r];
    for (int j = 0; j < count; ++j) {
      if (!(seen[r] >> j & 1)) continue;
      float probability = scratch.scores[int64_t{r} * kKeyTile + j];
      for (int first = 0; first < columns; first += kColumns * kWidth) {
        int width = smaller(kColumns * kWidth, columns - first);
        const float* value = scratch.value + int64_t{first} * count + j * width;
        for (int c = 0; c < width; ++c) output[first + c] += probability * value[c];
      }
    }
  }
}

void attend_tile(const AttentionArgs& args, const RowBlock& block, int first, int count, bool all_visible) {
  int rows = block.rows();
  int padded = round_up(count, kWidth);
  bool finite = pack_tile(args, block, first, count);
  multiply(scratch.query, args.params.head_dim, scratch.key, rows, args.params.head_dim, padded, nullptr,
           scratch.scores, kKeyTile);
  uint64_t seen[kMaxRows];
  for (int r = 0; r < rows; ++r) {
    float* scores = scratch.scores + int64_t{r} * kKeyTile;
    if (!all_visible) {
      finish_scores(args, block, row_of(block, r), first, count, scores);
    }
    if (!finite) {
      seen[r] = 0;
      for (int j = 0; j < count; ++j) seen[r] |= uint64_t{scores[j] != -kInfinity} << j;
    }
    online_softmax(r, padded, scores);
  }
  if (finite) {
    multiply(scratch.scores, kKeyTile, scratch.value, rows, count, scratch.value_columns, scratch.rescale,
             scratch.output, scratch.value_columns);
  } else {
    accumulate_seen(rows, count, seen);
  }
}

// Leaves row_max, row_sum and output of the block's rows in scratch.
void attend_rows(const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  int rows = block.rows();
  scratch.prepare(rows, p.head_dim, p.value_dim);
  for (int r = 0; r < rows; ++r) {
    scratch.row_max[r] = -kInfinity;
    scratch.row_sum[r] = 0;
  }
  for (int64_t i = 0; i < int64_t{rows} * scratch.value_columns; ++i) scratch.output[i] = 0;

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
  if (begin >= end) {
    return;
  }
  load_queries(args, block);
  bool plain_scores = p.softcap == 0 && !args.alibi_slopes && !args.bias && !args.visible;
  int tree_begin = args.tree ? p.key_len - p.tree_size : p.key_len;
  for (int first = begin; first < end; first += kKeyTile) {
    int count = smaller(kKeyTile, end - first);
    bool all_visible =
        plain_scores && count % kWidth == 0 && all.begin <= first && first + count <= smaller(all.end, tree_begin);
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
    float reference = finite_reference(row_max);
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

const Kernels kernels = {FLASHATTN_ISA_NAME, attend, attend_partial, merge};

}  // namespace flashattn::cpu::FLASHATTN_ISA
