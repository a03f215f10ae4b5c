// FlashAttention-2's forward pass for a block of rows (Dao 2023, arXiv:2307.08691, algorithm 1). The main loop goes
// over tiles of keys and values; each row keeps its maximum so far, its sum so far and its unnormalised output.
//
// Scores have the shape (keys, rows). So the softmax handles a vector of rows at a time, without sums across a vector.
// Only the queries are transposed, once for all tiles. No L x S array exists at any time.
//
// Compiled once per instruction set, see simd.h.
#include "kernels.h"

#include "forward.h"
#include "rows.h"
#include "scratch.h"
#include "simd.h"
#include "tile_rows.h"

namespace flashattn::cpu::FLASHATTN_ISA {
namespace {

// With more rows than this, multiply() reads the values several times, so packing the values first is faster.
constexpr int kMaxUnpackedRows = kTileRows + 2;

thread_local Scratch kept_scratch;  // kept for the thread's next block

template <typename Rows>
void copy_keys(Scratch& scratch, Rows keys, int count) {
  for (int j = 0; j < count; ++j) {
    float* target = scratch.key + int64_t{j} * scratch.depth;
    for (int d = 0; d < scratch.depth; d += kWidth) store_part(target, 1, d, scratch.depth, keys.part(j, d));
  }
}

// Packs the tile's values, with 0 in place of NaN and infinity. Otherwise a NaN would reach rows that do not see its
// key, because 0 * NaN is NaN. Returns whether all values were finite.
template <typename Rows>
bool pack_values(Scratch& scratch, Rows values, int count) {
  vfloat zero = {};  // stays 0 if all values are finite
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < scratch.value_columns; c += kWidth) {
      vfloat x = values.part(j, c);
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

// Returns the number to subtract from logits before exp. If a row has seen no key yet, its row_max and logits are -inf.
// Then any finite number gives exp(-inf) = 0, but subtracting row_max would give NaN.
FLASHATTN_INLINE vfloat finite_reference(vfloat row_max) {
  return row_max == broadcast(-kInfinity) ? broadcast(0) : row_max;
}

// Combines the lanes of a vector that belong to the same row. These lanes are `stride` apart, and all get the result.
template <typename Combine>
FLASHATTN_INLINE vfloat fold(vfloat v, int stride, Combine combine) {
  for (int distance = stride; distance < kWidth; distance *= 2) {
    float twice[2 * kWidth];
    store(twice, v);
    store(twice + kWidth, v);
    v = combine(v, load(twice + distance));
  }
  return v;
}

// Computes the online softmax. Logits become probabilities relative to the new row_max. row_max is subtracted before
// the multiplication by log2(e), because some models hide keys with logits as low as -FLT_MAX, which would overflow.
void online_softmax(Scratch& scratch, const Band& band, int count) {
  int size = count * band.padded_rows, step = band.lanes();
  for (int i = size; i % kWidth != 0; ++i) scratch.scores[i] = -kInfinity;  // fills the last vector
  for (int lane = 0; lane < step; lane += kWidth) {
    float* scores = scratch.scores + lane;
    int row = band.first + lane;
    vfloat old_max = load(scratch.row_max + row);
    vfloat new_max = old_max;
#pragma GCC unroll 4
    for (int i = 0; i < size; i += step) new_max = vmax(new_max, load(scores + i));
    new_max = fold(new_max, band.padded_rows, [](vfloat a, vfloat b) { return vmax(a, b); });
    vfloat reference = finite_reference(new_max);
    vfloat rescale = exp2((old_max - reference) * kLog2e);
    vfloat sum = {};  // each tile is summed separately, because small terms would be lost in a large row_sum
    for (int i = 0; i < size; i += step) {
      vfloat probability = exp2(load(scores + i) - reference, kLog2e);
      store(scores + i, probability);
      sum += probability;
    }
    sum = fold(sum, band.padded_rows, [](vfloat a, vfloat b) { return a + b; });
    store(scratch.row_max + row, new_max);
    store(scratch.row_sum + row, load(scratch.row_sum + row) * rescale + sum);
    store(scratch.rescale + row, rescale);
  }
}

// pack_values() replaced NaN and infinity in the values by 0. This function adds the terms of these values to the rows
// that see them. `seen` has the layout of scores.
template <typename Rows>
void add_not_finite(Scratch& scratch, Rows values, int value_dim, const Band& band, int count, const bool* seen) {
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < value_dim; ++c) {
      float x = values.element(j, c);
      if (x - x == 0) continue;
      for (int r = 0; r < band.rows; ++r) {
        if (seen[j * band.padded_rows + r]) {
          scratch.output[int64_t{band.first + r} * scratch.value_columns + c] +=
              scratch.scores[j * band.padded_rows + r] * x;
        }
      }
    }
  }
}

// Computes attention of a block of rows over one tile. Reads keys and values in place, or copies them once
// for all bands of the block.
template <typename Rows>
void attend_tile(Scratch& scratch, const AttentionArgs& args, const RowBlock& block, Span tile, Rows tile_keys,
                 Rows values) {
  const AttentionParams& p = args.params;
  int count = tile.end - tile.begin;
  const float* key_floats = tile_keys.floats();
  bool keys_in_place = scratch.few_rows ? tile_keys.in_place(scratch.depth) : key_floats != nullptr;
  bool values_in_place = block.rows() <= kMaxUnpackedRows && values.in_place(scratch.value_columns) &&
                         sees_all(args, block, scratch.bands[0], tile);
  if (!keys_in_place) {
    copy_keys(scratch, tile_keys, count);
  }
  bool finite = values_in_place || pack_values(scratch, values, count);

  const auto attend_keys = [&](const Band& band, Span keys) {
    int skipped = keys.begin - tile.begin;
    int seen_count = keys.end - keys.begin;

    if (!scratch.few_rows) {
      Left left = keys_in_place ? Left{key_floats + skipped * p.key.row, p.key.row, 1}
                                : Left{scratch.key + skipped * scratch.depth, scratch.depth, 1};
      Packed queries = {scratch.query + int64_t{band.first} * scratch.depth, scratch.depth, band.padded_rows, 0};
      multiply(left, queries, seen_count, scratch.depth, queries.columns, {scratch.scores, band.padded_rows, nullptr});
    } else if (keys_in_place) {
      dot(tile_keys, values, count, scratch.query, band.rows, scratch.depth, scratch.scores);
    } else {
      Right copied = {scratch.key, scratch.depth};
      dot(copied, copied, count, scratch.query, band.rows, scratch.depth, scratch.scores);
    }
    bool hides = !sees_all(args, block, band, keys);
    if (hides || changes_scores(args)) {
      finish_scores(scratch, args, block, band, keys);
    }
    bool seen[kKeyTile * kBandRows];
    for (int k = 0; !finite && k < seen_count * band.padded_rows; ++k) seen[k] = scratch.scores[k] != -kInfinity;
    online_softmax(scratch, band, seen_count);

    Left probabilities = {scratch.scores, 1, band.padded_rows};
    Result output = {scratch.output + int64_t{band.first} * scratch.value_columns, scratch.value_columns,
                     scratch.rescale + band.first};
    if (values_in_place) {
      multiply(probabilities, values, band.rows, count, p.value_dim, output);
    } else {
      multiply(probabilities, Packed{scratch.value, count, scratch.value_columns, skipped}, band.rows, seen_count,
               scratch.value_columns, output);
    }
    if (!finite) {
      add_not_finite(scratch, values.from(skipped), p.value_dim, band, seen_count, seen);
    }
  };
  for (int i = 0; i < scratch.band_count; ++i) {
    const Band& band = scratch.bands[i];
    Span remaining = {larger(tile.begin, band.any.begin), smaller(tile.end, band.any.end)};
    QueryRows rows = query_rows(block, band.first, band.rows);
    for (Span keys; remaining.begin < remaining.end; remaining.begin = keys.end) {
      keys = next_visible(args, rows, remaining, kKeyTile, block.decoded);
      if (keys.begin < keys.end) attend_keys(band, keys);
    }
  }
}

// Calls visit(keys, values) with the tile's keys and values, as PlainRows or QuantisedRows.
template <typename Visit>
FLASHATTN_INLINE void with_rows(Scratch& scratch, const AttentionArgs& args, const RowBlock& block, Span tile,
                                Visit visit) {
  const AttentionParams& p = args.params;
  if (p.bits == 0) {
    return with_dtype(args.dtype, [&](auto type) {
      using T = decltype(type);
      visit(PlainRows<T>{key_row<T>(args, block, args.key, p.key, tile.begin), p.key.row, p.key.column, p.head_dim},
            PlainRows<T>{key_row<T>(args, block, args.value, p.value, tile.begin), p.value.row, p.value.column,
                         p.value_dim});
    });
  }
  with_bits(p.bits, [&](auto bits) {
    visit(quantised_rows<bits.value>(scratch.key_store, args, block, tile, p.head_dim,
                                     {args.key, args.key_scales, args.key_biases, p.key, p.key_scales, p.key_biases}),
          quantised_rows<bits.value>(
              scratch.value_store, args, block, tile, p.value_dim,
              {args.value, args.value_scales, args.value_biases, p.value, p.value_scales, p.value_biases}));
  });
}

// Computes row_max, row_sum and the unnormalised output of the block's rows, and leaves them in scratch.
void attend_rows(Scratch& scratch, const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  scratch.prepare(block.rows(), p, block.decoded);
  load_rows(scratch, args, block);
  // The span from the first to the last key that some row sees. No other key is read.
  Span any = {p.key_len, 0};
  for (int i = 0; i < scratch.band_count; ++i) {
    any = {smaller(any.begin, scratch.bands[i].any.begin), larger(any.end, scratch.bands[i].any.end)};
  }
  Span remaining = {larger(any.begin, block.key_begin), smaller(any.end, block.key_end)};
  QueryRows rows = query_rows(block, 0, block.rows());
  for (Span tile; remaining.begin < remaining.end; remaining.begin = tile.end) {
    tile = next_visible(args, rows, remaining, kKeyTile, block.decoded);
    if (tile.begin >= tile.end) break;
    with_rows(scratch, args, block, tile,
              [&](auto keys, auto values) { attend_tile(scratch, args, block, tile, keys, values); });
  }
}

// Adds the sinks to row_sum, divides the outputs by it, and writes out, exact_out, lse and row_stats.
void finish_rows(Scratch& scratch, const AttentionArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.params;
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    int64_t out_offset = batch_offset(p, p.out, block.batch);
    float* lse = args.lse + batch_offset(p, p.lse, block.batch);
    float* row_stats = args.row_stats + batch_offset(p, p.row_stats, block.batch);
    for (int r = 0; r < block.rows(); ++r) {
      Row row = row_of(block, r);
      float row_max = scratch.row_max[r], row_sum = scratch.row_sum[r];
      bool saw_nothing = row_sum == 0;  // with a visible key, row_sum is at least 1 or NaN
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
      const auto store_output = [&](auto* target) {
        target += out_offset + row.head * p.out.head + row.query * p.out.row;
        for (int c = 0; c < p.value_dim; c += kWidth) {
          store_part(target, p.out.column, c, p.value_dim, load(output + c) * normalise);
        }
      };
      store_output(static_cast<T*>(args.out));
      if (args.exact_out) store_output(args.exact_out);
      lse[row.head * p.lse.head + row.query * p.lse.row] = saw_nothing ? -kInfinity : row_max + __builtin_logf(row_sum);
      float* stats = row_stats + row.head * p.row_stats.head + row.query * p.row_stats.row;
      stats[0] = row_max;
      stats[p.row_stats.column] = row_sum;
    }
  });
}

void attend(const AttentionArgs& args, const RowBlock& block) {
  Scratch& scratch = of_thread(kept_scratch);
  attend_rows(scratch, args, block);
  finish_rows(scratch, args, block);
}

void attend_partial(const AttentionArgs& args, const RowBlock& block, float* partial) {
  Scratch& scratch = of_thread(kept_scratch);
  attend_rows(scratch, args, block);
  int value_dim = args.params.value_dim;
  for (int r = 0; r < block.rows(); ++r, partial += partial_row_size(value_dim)) {
    partial[0] = scratch.row_max[r];
    partial[1] = scratch.row_sum[r];
    const float* output = scratch.output + int64_t{r} * scratch.value_columns;
    for (int c = 0; c < value_dim; ++c) partial[2 + c] = output[c];
  }
}

void merge(int rows, int value_dim, float* partial, const float* later) {
  for (int r = 0; r < rows; ++r) {
    float row_max = larger(partial[0], later[0]);
    float reference = row_max == -kInfinity ? 0.0f : row_max;
    float weight = exp2((partial[0] - reference) * kLog2e), later_weight = exp2((later[0] - reference) * kLog2e);
    partial[0] = row_max;
    for (int64_t i = 1; i < partial_row_size(value_dim); ++i) {
      partial[i] = partial[i] * weight + later[i] * later_weight;
    }
    partial += partial_row_size(value_dim);
    later += partial_row_size(value_dim);
  }
}

void finish(const AttentionArgs& args, const RowBlock& block, const float* partial) {
  Scratch& scratch = of_thread(kept_scratch);
  int value_dim = args.params.value_dim;
  scratch.prepare(block.rows(), args.params, block.decoded);
  for (int r = 0; r < block.rows(); ++r, partial += partial_row_size(value_dim)) {
    scratch.row_max[r] = partial[0];
    scratch.row_sum[r] = partial[1];
    float* output = scratch.output + int64_t{r} * scratch.value_columns;
    for (int c = 0; c < value_dim; ++c) output[c] = partial[2 + c];
  }
  finish_rows(scratch, args, block);
}

}  // namespace

const Kernels kernels = {FLASHATTN_ISA_NAME, kMaxDotRows,      kMaxDotHeads,  attend, attend_partial, merge, finish,
                         find_blocks,        backward_kernels, roofline_loops};

}  // namespace flashattn::cpu::FLASHATTN_ISA
