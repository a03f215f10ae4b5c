// FlashAttention-2's forward pass for a block of rows (Dao 2023, arXiv:2307.08691, algorithm 1): keys and
// values go by in tiles; each row keeps its maximum so far, its sum so far and its unnormalised output.
//
// Scores are kept transposed, (keys, rows): the softmax then works on a vector of rows at a time, with no
// sums across a vector, and neither keys nor probabilities are ever transposed. Only the queries are, once
// for all tiles. No L x S array exists at any time.
//
// Compiled once per instruction set, see simd.h.
#include "kernels.h"

#include "attention.h"
#include "dtype.h"
#include "matmul.h"
#include "scratch.h"
#include "simd.h"
#include "visibility.h"

namespace flashattn::cpu::FLASHATTN_ISA {
namespace {

// Packing the values pays for itself from so many rows on that they go by more than once.
constexpr int kMaxUnpackedRows = kRows + 2;

thread_local Scratch kept_scratch;  // for the thread's next block

// Calls visit(T{}) with the storage type of query, key, value and out.
template <typename Visit>
FLASHATTN_INLINE void with_dtype(Dtype dtype, Visit visit) {
  switch (dtype) {
    case Dtype::float32: return visit(float{});
    case Dtype::float16: return visit(half_t{});
    case Dtype::bfloat16: return visit(bfloat_t{});
  }
}

// Row r of a block. The heads of one query lie side by side, so that neighbouring rows see nearly the same keys.
struct Row {
  int head, query;
};
FLASHATTN_INLINE Row row_of(const RowBlock& block, int r) {
  return {block.head_begin + r % block.head_count, block.query_begin + r / block.head_count};
}

FLASHATTN_INLINE int kv_head_of(const AttentionArgs& args, const RowBlock& block) {
  return block.head_begin / (args.params.num_heads / args.params.num_kv_heads);
}

// Rows of T as the block's batch element and head have them.
template <typename T>
const T* keys_of(const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  return static_cast<const T*>(args.key) + batch_offset(p, p.key, block.batch) + kv_head_of(args, block) * p.key.head;
}
template <typename T>
const T* values_of(const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  return static_cast<const T*>(args.value) + batch_offset(p, p.value, block.batch) +
         kv_head_of(args, block) * p.value.head;
}

// The queries, times `factor`, as the product for the scores wants them.
template <typename T>
void load_queries(Scratch& scratch, const AttentionArgs& args, const RowBlock& block, float factor) {
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
  for (int r = 0; r < scratch.columns; r += kWidth) {
    const T* rows[kWidth];
    for (int i = 0; i < kWidth; ++i) rows[i] = source(r + i);
    for (int d = 0; d < p.head_dim; d += kWidth) {
      vfloat tile[kWidth];
      for (int i = 0; i < kWidth; ++i) tile[i] = load_part(rows[i], p.query.column, d, p.head_dim) * factor;
      transpose(tile);
      for (int k = 0; k < smaller(kWidth, p.head_dim - d); ++k) {
        store(scratch.query + packed_index(d + k, r, p.head_dim, scratch.columns), tile[k]);
      }
    }
  }
}

// Everything that stays the same for all the tiles of a block.
void load_rows(Scratch& scratch, const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  const auto set = [&](int r, Interval seen, int position, float slope) {
    scratch.row_max[r] = -kInfinity;
    scratch.row_sum[r] = 0;
    scratch.seen_begin[r] = seen.begin;
    scratch.seen_end[r] = seen.end;
    scratch.position[r] = position;
    scratch.slope[r] = slope;
    scratch.next_key[r] = r / scratch.columns;
  };
  for (int r = 0, i = 0; i < block.query_count; ++i) {
    int query = block.query_begin + i;
    Interval seen = visible_keys(args, block.batch, query);
    for (int h = 0; h < block.head_count; ++h, ++r) {
      float slope = 0;
      if (args.alibi_slopes) {
        const Strides& strides = p.alibi_slopes;
        slope = args.alibi_slopes[batch_offset(p, strides, block.batch) + (block.head_begin + h) * strides.head];
      }
      set(r, seen, query + p.key_len - p.query_len, slope);
    }
  }
  // Padding is computed along and never stored.
  for (int r = block.rows(); r < scratch.columns; ++r) set(r, {0, p.key_len}, 0, 0);
  for (int lane = scratch.columns; lane < kWidth; ++lane) {
    int r = lane - scratch.columns;
    set(lane, {scratch.seen_begin[r], scratch.seen_end[r]}, scratch.position[r], scratch.slope[r]);
  }
  scratch.band_count = 0;
  for (int first = 0; first < block.rows(); first += kBandRows) {
    Band band = {first,
                 smaller(kBandRows, block.rows() - first),
                 smaller(kBandRows, scratch.columns - first),
                 {p.key_len, 0},
                 {0, p.key_len}};
    for (int r = first; r < first + band.rows; ++r) {
      Interval seen = {scratch.seen_begin[r], scratch.seen_end[r]};
      if (seen.begin < seen.end) {
        band.any = {smaller(band.any.begin, seen.begin), larger(band.any.end, seen.end)};
      }
      band.all = {larger(band.all.begin, seen.begin), smaller(band.all.end, seen.end)};
    }
    scratch.bands[scratch.band_count++] = band;
  }
  __builtin_memset(scratch.output, 0, sizeof(float) * block.rows() * scratch.value_columns);

  // Scores leave the product as what softcap's tanh, or the softmax, is applied to.
  float factor = p.softcap > 0 ? p.scale / p.softcap : p.scale;
  with_dtype(args.dtype, [&](auto type) { load_queries<decltype(type)>(scratch, args, block, factor); });
}

// The tile's keys as floats, side by side.
template <typename T>
void copy_keys(Scratch& scratch, const AttentionParams& p, const T* key, int count) {
  for (int j = 0; j < count; ++j) {
    float* target = scratch.key + int64_t{j} * scratch.depth;
    for (int d = 0; d < scratch.depth; d += kWidth) {
      store_part(target, 1, d, scratch.depth, load_part(key + j * p.key.row, p.key.column, d, p.head_dim));
    }
  }
}

// Packs the tile's values. If NaN or infinity is among them, it leaves 0 in their place: they must not reach a row
// that does not see them, through 0 * NaN. Returns whether there were none.
template <typename T>
bool pack_values(Scratch& scratch, const AttentionParams& p, const T* value, int count) {
  vfloat zero = {};  // stays 0 unless something is not finite
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < scratch.value_columns; c += kWidth) {
      vfloat x = load_part(value + j * p.value.row, p.value.column, c, p.value_dim);
      store(scratch.value + packed_index(j, c, count, scratch.value_columns), x);
      zero += x * 0.0f;
    }
  }
  for (int i = 0; i < kWidth; ++i) {
    if (zero[i] == 0) continue;
    for (int64_t k = 0; k < int64_t{count} * scratch.value_columns; ++k) {
      scratch.value[k] = scratch.value[k] - scratch.value[k] == 0 ? scratch.value[k] : 0;
    }
    return false;
  }
  return true;
}

// Softcap, ALiBi, masks. In: q·k * scale (/ softcap). Out: the logits; -inf where a row does not see a key.
void finish_scores(Scratch& scratch, const AttentionArgs& args, const RowBlock& block, const Band& band,
                   Interval keys) {
  const AttentionParams& p = args.params;
  const auto for_each_vector = [&](auto visit) {
    for (int j = keys.begin; j < keys.end; j += band.keys()) {
      for (int lane = 0; lane < band.lanes(); lane += kWidth) {
        float* scores = scratch.scores + (j - keys.begin) * band.columns + lane;
        int row = band.first + lane;
        store(scores, visit(load(scores), row, load(scratch.next_key + row) + j));
      }
    }
  };
  if (p.softcap > 0) {
    for_each_vector([&](vfloat scores, int, vint) { return tanh(scores) * p.softcap; });
  }
  if (args.alibi_slopes) {
    for_each_vector([&](vfloat scores, int row, vint key) {
      vint distance = load(scratch.position + row) - key;
      distance = distance < 0 ? -distance : distance;
      return scores - load(scratch.slope + row) * to_float(distance);
    });
  }
  if (args.bias || args.visible || args.tree) {
    for (int r = band.first; r < band.first + band.rows; ++r) {
      Row row = row_of(block, r);
      Interval seen = {larger(scratch.seen_begin[r], keys.begin), smaller(scratch.seen_end[r], keys.end)};
      Scores scores = {scratch.scores + r - band.first, band.columns, keys.begin};
      if (args.bias && seen.begin < seen.end) {
        add_bias(args, block.batch, row.head, row.query, seen, scores);
      }
      hide_unseen(args, block.batch, row.head, row.query, seen, scores);
    }
  }
  for_each_vector([&](vfloat scores, int row, vint key) {
    vint seen = (load(scratch.seen_begin + row) <= key) & (load(scratch.seen_end + row) > key);
    return seen ? scores : broadcast(-kInfinity);
  });
}

// What to subtract before exponentiating. Where nothing is visible yet, any finite number gives
// exp(-inf) = 0; -inf - -inf would give NaN.
FLASHATTN_INLINE vfloat finite_reference(vfloat row_max) {
  return row_max == broadcast(-kInfinity) ? broadcast(0) : row_max;
}

// Combines the lanes of a vector that belong to the same row, which are `columns` apart: each gets the result.
template <typename Combine>
FLASHATTN_INLINE vfloat fold(vfloat v, int columns, Combine combine) {
  for (int distance = columns; distance < kWidth; distance *= 2) {
    float twice[2 * kWidth];
    store(twice, v);
    store(twice + kWidth, v);
    v = combine(v, load(twice + distance));
  }
  return v;
}

// The online softmax, a vector of rows at a time: logits become probabilities relative to the new row_max.
// The difference comes first, then the change of base: logits as low as -FLT_MAX, which some use to hide,
// must not overflow.
void online_softmax(Scratch& scratch, const Band& band, int count) {
  int size = count * band.columns, step = band.lanes();
  for (int i = size; i % kWidth != 0; ++i) scratch.scores[i] = -kInfinity;  // the rest of a vector: keys of no tile
  for (int lane = 0; lane < step; lane += kWidth) {
    float* scores = scratch.scores + lane;
    int row = band.first + lane;
    vfloat old_max = load(scratch.row_max + row);
    vfloat new_max = old_max;
    for (int i = 0; i < size; i += step) new_max = vmax(new_max, load(scores + i));
    new_max = fold(new_max, band.columns, [](vfloat a, vfloat b) { return vmax(a, b); });
    vfloat reference = finite_reference(new_max);
    vfloat rescale = exp2((old_max - reference) * kLog2e);
    vfloat sum = {};  // of this tile alone: small numbers are not lost beside the large sum so far
    for (int i = 0; i < size; i += step) {
      vfloat probability = exp2((load(scores + i) - reference) * kLog2e);
      store(scores + i, probability);
      sum += probability;
    }
    sum = fold(sum, band.columns, [](vfloat a, vfloat b) { return a + b; });
    store(scratch.row_max + row, new_max);
    store(scratch.row_sum + row, load(scratch.row_sum + row) * rescale + sum);
    store(scratch.rescale + row, rescale);
  }
}

// Adds what pack_values() left out: NaN and infinity, to the rows that see their keys. `seen` lies as the scores do.
template <typename T>
void add_not_finite(Scratch& scratch, const AttentionParams& p, const T* value, const Band& band, int count,
                    const bool* seen) {
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < p.value_dim; ++c) {
      float x = to_float(value[j * p.value.row + c * p.value.column]);
      if (x - x == 0) continue;
      for (int r = 0; r < band.rows; ++r) {
        if (seen[j * band.columns + r]) {
          scratch.output[int64_t{band.first + r} * scratch.value_columns + c] +=
              scratch.scores[j * band.columns + r] * x;
        }
      }
    }
  }
}

// Whether all rows of the band see all of these keys.
FLASHATTN_INLINE bool sees_all(const AttentionArgs& args, const Band& band, Interval keys) {
  int tree_begin = args.tree ? args.params.key_len - args.params.tree_size : args.params.key_len;
  return !args.bias && !args.visible && band.all.begin <= keys.begin && keys.end <= smaller(band.all.end, tree_begin);
}

// Keys and values are read where they lie if they can be; otherwise they are copied once for all bands.
template <typename T>
void attend_tile(Scratch& scratch, const AttentionArgs& args, const RowBlock& block, Interval tile) {
  const AttentionParams& p = args.params;
  const T* key = keys_of<T>(args, block) + tile.begin * p.key.row;
  const T* value = values_of<T>(args, block) + tile.begin * p.value.row;
  int count = tile.end - tile.begin;
  bool keys_in_place =
      p.key.column == 1 && (scratch.few_rows ? p.head_dim == scratch.depth : sizeof(T) == sizeof(float));
  bool values_in_place = block.rows() <= kMaxUnpackedRows && p.value.column == 1 &&
                         p.value_dim == scratch.value_columns && sees_all(args, scratch.bands[0], tile);
  if (!keys_in_place) {
    copy_keys(scratch, p, key, count);
  }
  bool finite = values_in_place || pack_values(scratch, p, value, count);

  for (int i = 0; i < scratch.band_count; ++i) {
    const Band& band = scratch.bands[i];
    Interval keys = {larger(tile.begin, band.any.begin), smaller(tile.end, band.any.end)};
    if (keys.begin >= keys.end) continue;
    int skipped = keys.begin - tile.begin;
    int seen_count = keys.end - keys.begin;

    if (!scratch.few_rows) {
      Left left = keys_in_place ? Left{reinterpret_cast<const float*>(key) + skipped * p.key.row, p.key.row, 1}
                                : Left{scratch.key + skipped * scratch.depth, scratch.depth, 1};
      Packed queries = {scratch.query + int64_t{band.first} * scratch.depth, scratch.depth, band.columns, 0};
      multiply_packed(left, queries, seen_count, scratch.depth, {scratch.scores, band.columns, nullptr});
    } else if (keys_in_place) {
      dot(Right<T>{key, p.key.row}, Right<T>{value, p.value.row}, count, scratch.query, band.rows, scratch.depth,
          scratch.scores);
    } else {
      Right<float> copied = {scratch.key, scratch.depth};
      dot(copied, copied, count, scratch.query, band.rows, scratch.depth, scratch.scores);
    }
    bool hides = !sees_all(args, band, keys);
    if (hides || p.softcap > 0 || args.alibi_slopes) {
      finish_scores(scratch, args, block, band, keys);
    }
    bool seen[kKeyTile * kBandRows];
    for (int k = 0; !finite && k < seen_count * band.columns; ++k) seen[k] = scratch.scores[k] != -kInfinity;
    online_softmax(scratch, band, seen_count);

    Left probabilities = {scratch.scores, 1, band.columns};
    Result output = {scratch.output + int64_t{band.first} * scratch.value_columns, scratch.value_columns,
                     scratch.rescale + band.first};
    if (values_in_place) {
      multiply(probabilities, Right<T>{value, p.value.row}, band.rows, count, p.value_dim, output);
    } else {
      multiply_packed(probabilities, Packed{scratch.value, count, scratch.value_columns, skipped}, band.rows,
                      seen_count, output);
    }
    if (!finite) {
      add_not_finite(scratch, p, value + skipped * p.value.row, band, seen_count, seen);
    }
  }
}

// Leaves row_max, row_sum and output of the block's rows in scratch.
void attend_rows(Scratch& scratch, const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  scratch.prepare(block.rows(), p.head_dim, p.value_dim);
  load_rows(scratch, args, block);
  // Keys outside of every row's interval are never touched.
  Interval any = {p.key_len, 0};
  for (int i = 0; i < scratch.band_count; ++i) {
    any = {smaller(any.begin, scratch.bands[i].any.begin), larger(any.end, scratch.bands[i].any.end)};
  }
  int end = smaller(any.end, block.key_end);
  for (int first = larger(any.begin, block.key_begin); first < end; first += kKeyTile) {
    Interval tile = {first, smaller(first + kKeyTile, end)};
    with_dtype(args.dtype, [&](auto type) { attend_tile<decltype(type)>(scratch, args, block, tile); });
  }
}

// Divides by the sum, sinks included, and writes out and lse.
void finish_rows(Scratch& scratch, const AttentionArgs& args, const RowBlock& block) {
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
      for (int c = 0; c < p.value_dim; c += kWidth) {
        store_part(target, p.out.column, c, p.value_dim, load(output + c) * normalise);
      }
      lse[row.head * p.lse.head + row.query * p.lse.row] = saw_nothing ? -kInfinity : row_max + __builtin_logf(row_sum);
    }
  });
}

void attend(const AttentionArgs& args, const RowBlock& block) {
  Scratch& scratch = kept_scratch;
  attend_rows(scratch, args, block);
  finish_rows(scratch, args, block);
}

void attend_partial(const AttentionArgs& args, const RowBlock& block, float* partial) {
  Scratch& scratch = kept_scratch;
  attend_rows(scratch, args, block);
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
  Scratch& scratch = kept_scratch;
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
  finish_rows(scratch, args, block);
}

}  // namespace

const Kernels kernels = {FLASHATTN_ISA_NAME, attend, attend_partial, merge, roofline_loops};

}  // namespace flashattn::cpu::FLASHATTN_ISA
