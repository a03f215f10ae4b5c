// FlashAttention-2's backward pass for one tile of keys (Dao 2023, arXiv:2307.08691, algorithm 2). The main loop goes
// over the bands of rows that see some of the keys. It recomputes each band's probabilities from row_max and row_sum.
//
// In these formulas P are the probabilities of a band's rows for the tile's keys, O' is the gradient of the output, and
// delta is BackwardArgs::delta:
//   dV = Pᵀ O'     dP = O' Vᵀ     dS = P (dP - delta)     dQ = scale dS K     dK = scale dSᵀ Q
// As in the forward pass, scores and probabilities have the shape (keys, rows). So neither keys nor scores are
// transposed. Compiled once per instruction set, see simd.h.
#include "backward_kernels.h"

#include "rows.h"

namespace flashattn::cpu::FLASHATTN_ISA {
namespace {

// A thread's working memory for a tile and one band of rows.
struct TileScratch {
  KeptMemory memory;

  int depth, value_depth;  // head_dim and value_dim, padded to whole vectors
  // Arrays for the tile:
  float* key;             // (keys, depth)
  float* key_packed;      // packed (keys, depth), with 0 in place of NaN and infinity
  float* value;           // (keys, value_depth)
  float* key_gradient;    // (keys, depth), not yet multiplied by scale
  float* value_gradient;  // (keys, value_depth)
  // Arrays for the band:
  float* query;           // packed (rows, depth), with 0 in place of NaN and infinity
  float* out_gradient;    // packed (rows, value_depth), with 0 in place of NaN and infinity
  float* out_gradient_t;  // packed (value_dim, rows)
  float* score_gradient;  // (keys, rows)
  float* query_gradient;  // (rows, depth), not yet multiplied by scale
  float* cap_slope;       // (keys, rows), see cap_slopes()
  float row_max[kBandRows];
  float log2_sum[kBandRows];  // +inf if the row sees no key, so that its probabilities become 0
  float delta[kBandRows];
  float ones[kKeyTile];

  void prepare(const AttentionParams& p) {
    depth = round_up(p.head_dim, kWidth);
    value_depth = round_up(p.value_dim, kWidth);
    const int64_t keys = kKeyTile, rows = kBandRows;
    memory.lay_out({{&key, keys * depth},
                    {&key_packed, keys * depth},
                    {&value, keys * value_depth},
                    {&key_gradient, keys * depth},
                    {&value_gradient, keys * value_depth},
                    {&query, rows * depth},
                    {&out_gradient, rows * value_depth},
                    {&out_gradient_t, rows * value_depth},
                    {&score_gradient, keys * rows},
                    {&query_gradient, rows * depth},
                    {&cap_slope, caps(p) ? keys * rows : 0}});
    for (float& one : ones) one = 1;
  }
};

thread_local Scratch kept_rows;
thread_local TileScratch kept_tile;

FLASHATTN_INLINE vfloat finite_or_zero(vfloat x) {
  return x - x == broadcast(0) ? x : broadcast(0);
}

// Returns the index of row r of a block, in row-major order of (*B, H_q, L).
int64_t row_index(const AttentionParams& p, const RowBlock& block, int r) {
  Row row = row_of(block, r);
  return (block.batch * p.num_heads + row.head) * p.query_len + row.query;
}

// Copies `count` rows of `columns` elements to zero-padded rows of `depth` floats.
template <typename T>
void copy_rows(float* target, const T* source, const Strides& strides, int count, int columns, int depth) {
  for (int r = 0; r < count; ++r) {
    for (int c = 0; c < depth; c += kWidth) {
      store(target + int64_t{r} * depth + c, load_part(source + r * strides.row, strides.column, c, columns));
    }
  }
}

// Packs source(0) to source(count - 1) as rows of a right operand (rows, depth) of multiply(). NaN, infinity and
// rows from `count` on become 0. Returns whether all elements were finite.
template <typename T, typename Source>
bool pack_rows(float* packed, Source source, int64_t column_stride, int count, int rows, int columns, int depth) {
  vfloat zero = {};  // stays 0 if all elements are finite
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < depth; c += kWidth) {
      vfloat x = r < count ? load_part(source(r), column_stride, c, columns) : vfloat{};
      zero += x * 0.0f;
      store(packed + packed_index(r, c, rows, depth), finite_or_zero(x));
    }
  }
  for (int i = 0; i < kWidth; ++i) {
    if (zero[i] != 0) return false;
  }
  return true;
}

template <typename T>
void load_tile(TileScratch& tile, const BackwardArgs& args, const KeyTile& keys) {
  const AttentionParams& p = args.forward.params;
  RowBlock head = {};
  head.batch = keys.batch;
  head.head_begin = keys.kv_head * (p.num_heads / p.num_kv_heads);
  const T* key = key_row<T>(args.forward, head, args.forward.key, p.key, keys.begin);
  const T* value = key_row<T>(args.forward, head, args.forward.value, p.value, keys.begin);
  int count = keys.end - keys.begin;
  copy_rows(tile.key, key, p.key, count, p.head_dim, tile.depth);
  copy_rows(tile.value, value, p.value, count, p.value_dim, tile.value_depth);
  pack_rows<T>(
      tile.key_packed, [&](int r) { return key + r * p.key.row; }, p.key.column, count, count, p.head_dim, tile.depth);
  __builtin_memset(tile.key_gradient, 0, sizeof(float) * count * tile.depth);
  __builtin_memset(tile.value_gradient, 0, sizeof(float) * count * tile.value_depth);
}

// Loads a band's queries, output gradients and row statistics. Returns whether its output gradients are finite.
template <typename T>
bool load_band(TileScratch& tile, const Scratch& rows, const BackwardArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.forward.params;
  const Strides& strides = args.out_gradient_strides;
  const T* query = static_cast<const T*>(args.forward.query) + batch_offset(p, p.query, block.batch);
  const T* gradient = static_cast<const T*>(args.out_gradient) + batch_offset(p, strides, block.batch);
  const auto query_row = [&](int r) {
    Row row = row_of(block, r);
    return query + row.head * p.query.head + row.query * p.query.row;
  };
  const auto gradient_row = [&](int r) {
    Row row = row_of(block, r < block.rows() ? r : 0);  // padding repeats the first row
    return gradient + row.head * strides.head + row.query * strides.row;
  };
  pack_rows<T>(tile.query, query_row, p.query.column, block.rows(), rows.padded_rows, p.head_dim, tile.depth);
  bool finite = pack_rows<T>(tile.out_gradient, gradient_row, strides.column, block.rows(), rows.padded_rows,
                             p.value_dim, tile.value_depth);
  pack_transposed<T>(tile.out_gradient_t, gradient_row, strides.column, p.value_dim, rows.padded_rows, 1.0f);

  const float* row_stats = args.forward.row_stats + batch_offset(p, p.row_stats, block.batch);
  for (int r = 0; r < rows.padded_rows; ++r) {
    tile.row_max[r] = 0;
    tile.log2_sum[r] = kInfinity;
    tile.delta[r] = 0;
    if (r < block.rows()) {
      Row row = row_of(block, r);
      const float* stats = row_stats + row.head * p.row_stats.head + row.query * p.row_stats.row;
      float row_sum = stats[p.row_stats.column];
      if (row_sum != 0) {
        tile.row_max[r] = stats[0];
        tile.log2_sum[r] = __builtin_log2f(row_sum);
      }
      tile.delta[r] = args.delta[row_index(p, block, r)];
    }
  }
  return finite;
}

// Computes q·k with the same bits as the forward pass. If the two passes rounded differently, the recomputed
// probability of a key that dominates its row would be wrong by the rounding error of the key's score.
void multiply_queries(TileScratch& tile, Scratch& rows, const BackwardArgs& args, int first, int count) {
  const AttentionParams& p = args.forward.params;
  const float* keys = tile.key + int64_t{first} * tile.depth;
  bool by_dot = args.decoded && p.num_heads / p.num_kv_heads <= kMaxDotHeads;  // whether decode() used dot()
  if (!by_dot) {
    multiply(Left{keys, tile.depth, 1}, Packed{rows.query, rows.depth, rows.padded_rows, 0}, count, p.head_dim,
             rows.padded_rows, {rows.scores, rows.padded_rows, nullptr});
    return;
  }
  Right right = {keys, tile.depth};
  float *query = tile.query_gradient, *scores = tile.score_gradient;  // used as scratch until later steps fill them
  for (int d = 0; d < tile.depth; ++d) query[d] = 0;
  for (int r = 0; r < rows.padded_rows; ++r) {
    for (int d = 0; d < p.head_dim; ++d) query[d] = rows.query[packed_index(d, r, rows.depth, rows.padded_rows)];
    dot(right, right, count, query, 1, tile.depth, scores);
    for (int j = 0; j < count; ++j) rows.scores[int64_t{j} * rows.padded_rows + r] = scores[j];
  }
}

// Turns logits into probabilities, and gradients of probabilities into gradients of scores. Both results are 0 where a
// row does not see a key, even if the key's value or the row's row_sum is NaN. They are also 0 in padding rows.
void finish_gradients(TileScratch& tile, Scratch& rows, int count, bool capped) {
  for (int j = 0; j < count; ++j) {
    for (int lane = 0; lane < rows.padded_rows; lane += kWidth) {
      int64_t at = int64_t{j} * rows.padded_rows + lane;
      vfloat score = load(rows.scores + at), log2_sum = load(tile.log2_sum + lane);
      vfloat probability = exp2((score - load(tile.row_max + lane)) * kLog2e - log2_sum);
      vint hidden = (score == broadcast(-kInfinity)) | (log2_sum == broadcast(kInfinity));
      vfloat gradient = probability * (load(tile.score_gradient + at) - load(tile.delta + lane));
      if (capped) gradient *= load(tile.cap_slope + at);
      store(rows.scores + at, hidden ? broadcast(0) : probability);
      store(tile.score_gradient + at, hidden ? broadcast(0) : gradient);
    }
  }
}

// load_band() replaced NaN and infinity in the output's gradient by 0. This function adds the missing terms to the
// value gradients. In a row with such an element, only hidden keys have a finite score gradient.
template <typename T>
void add_not_finite(TileScratch& tile, const Scratch& rows, const BackwardArgs& args, const RowBlock& block, int first,
                    int count) {
  const AttentionParams& p = args.forward.params;
  const Strides& strides = args.out_gradient_strides;
  const T* gradient = static_cast<const T*>(args.out_gradient) + batch_offset(p, strides, block.batch);
  for (int r = 0; r < block.rows(); ++r) {
    Row row = row_of(block, r);
    for (int c = 0; c < p.value_dim; ++c) {
      float x = to_float(gradient[row.head * strides.head + row.query * strides.row + c * strides.column]);
      if (x - x == 0) continue;
      for (int j = 0; j < count; ++j) {
        int64_t at = int64_t{j} * rows.padded_rows + r;
        bool seen = tile.score_gradient[at] - tile.score_gradient[at] != 0;
        if (seen) tile.value_gradient[int64_t{first + j} * tile.value_depth + c] += rows.scores[at] * x;
      }
    }
  }
}

template <typename T>
void store_rows(const float* source, int depth, float factor, T* target, int count, int columns) {
  for (int r = 0; r < count; ++r) {
    for (int c = 0; c < columns; c += kWidth) {
      store_part(target + int64_t{r} * columns, 1, c, columns, load(source + int64_t{r} * depth + c) * factor);
    }
  }
}

// Between two tiles, args.query_gradient holds the float32 sums of a band's query gradients. If its elements have 16
// bits, it holds the upper half of each sum's bits, and keys.query_gradient_lower holds the lower half.
template <typename T>
void load_sum(TileScratch& tile, const BackwardArgs& args, const KeyTile& keys, const RowBlock& block) {
  const AttentionParams& p = args.forward.params;
  for (int r = 0; r < block.rows(); ++r) {
    int64_t at = row_index(p, block, r) * p.head_dim;
    const T* gradient = static_cast<const T*>(args.query_gradient) + at;
    float* sum = tile.query_gradient + int64_t{r} * tile.depth;
    for (int c = p.head_dim; c < tile.depth; ++c) sum[c] = 0;
    if constexpr (sizeof(T) == sizeof(float)) {
      __builtin_memcpy(sum, gradient, sizeof(float) * p.head_dim);
    } else {
      const uint16_t* lower = keys.query_gradient_lower + at;
      for (int c = 0; c < p.head_dim; ++c) sum[c] = bit_cast<float>(uint32_t{gradient[c].bits} << 16 | lower[c]);
    }
  }
}

template <typename T>
void store_sum(const TileScratch& tile, const BackwardArgs& args, const KeyTile& keys, const RowBlock& block) {
  const AttentionParams& p = args.forward.params;
  for (int r = 0; r < block.rows(); ++r) {
    int64_t at = row_index(p, block, r) * p.head_dim;
    T* gradient = static_cast<T*>(args.query_gradient) + at;
    const float* sum = tile.query_gradient + int64_t{r} * tile.depth;
    if constexpr (sizeof(T) == sizeof(float)) {
      __builtin_memcpy(gradient, sum, sizeof(float) * p.head_dim);
    } else {
      uint16_t* lower = keys.query_gradient_lower + at;
      for (int c = 0; c < p.head_dim; ++c) {
        uint32_t bits = bit_cast<uint32_t>(sum[c]);
        gradient[c].bits = static_cast<uint16_t>(bits >> 16);
        lower[c] = static_cast<uint16_t>(bits);
      }
    }
  }
}

template <typename T>
void store_query_gradient(const TileScratch& tile, const BackwardArgs& args, const RowBlock& block) {
  const AttentionParams& p = args.forward.params;
  for (int r = 0; r < block.rows(); ++r) {
    T* target = static_cast<T*>(args.query_gradient) + row_index(p, block, r) * p.head_dim;
    store_rows(tile.query_gradient + int64_t{r} * tile.depth, tile.depth, p.scale, target, 1, p.head_dim);
  }
}

template <typename T>
void attend_backward(const BackwardArgs& args, const KeyTile& keys, Turns& turns) {
  const AttentionArgs& forward = args.forward;
  const AttentionParams& p = forward.params;
  TileScratch& tile = of_thread(kept_tile);
  Scratch& rows = of_thread(kept_rows);
  tile.prepare(p);
  load_tile<T>(tile, args, keys);

  for (int b = 0; b < keys.band_count; ++b) {
    const RowBand& band = keys.bands[b];
    int turn = keys.index - band.first_tile;
    if (turn < 0 || turn >= band.tile_count) continue;
    QueryRows queries = query_rows(band.block, 0, band.block.rows());
    bool shows = false;
    for (int i = keys.begin / kBlockSize; i * kBlockSize < keys.end; ++i) {
      shows = shows || (mapped_block(forward, queries, i) & kBlockShows);
    }
    if (!shows) {  // skips this tile; a band's first and last tile are never skipped, see bands_of()
      turns.wait(b, turn);
      turns.done(b);
      continue;
    }
    rows.prepare(band.block.rows(), p, false);
    load_rows(rows, forward, band.block);
    bool finite = load_band<T>(tile, rows, args, band.block);
    const Band& seen = rows.bands[0];
    Span remaining = {larger(keys.begin, seen.any.begin), smaller(keys.end, seen.any.end)};
    bool summed = false;
    for (Span seen_keys; remaining.begin < remaining.end; remaining.begin = seen_keys.end) {
      seen_keys = next_visible(forward, queries, remaining, kKeyTile, false);
      if (seen_keys.begin >= seen_keys.end) break;
      int first = seen_keys.begin - keys.begin, count = seen_keys.end - seen_keys.begin;
      multiply_queries(tile, rows, args, first, count);
      if (caps(p)) {
        cap_slopes(rows.scores, p, tile.cap_slope, int64_t{count} * rows.padded_rows);
      }
      if (!sees_all(forward, band.block, seen, seen_keys) || changes_scores(forward)) {
        finish_scores(rows, forward, band.block, seen, seen_keys);
      }
      Packed gradients = {tile.out_gradient_t, p.value_dim, rows.padded_rows, 0};
      multiply(Left{tile.value + int64_t{first} * tile.value_depth, tile.value_depth, 1}, gradients, count, p.value_dim,
               rows.padded_rows, {tile.score_gradient, rows.padded_rows, nullptr});
      finish_gradients(tile, rows, count, caps(p));

      Left probabilities = {rows.scores, rows.padded_rows, 1},
           score_gradients = {tile.score_gradient, rows.padded_rows, 1};
      multiply(probabilities, Packed{tile.out_gradient, rows.padded_rows, tile.value_depth, 0}, count, rows.padded_rows,
               tile.value_depth,
               {tile.value_gradient + int64_t{first} * tile.value_depth, tile.value_depth, tile.ones});
      if (!finite) {
        add_not_finite<T>(tile, rows, args, band.block, first, count);
      }
      multiply(score_gradients, Packed{tile.query, rows.padded_rows, tile.depth, 0}, count, rows.padded_rows,
               tile.depth, {tile.key_gradient + int64_t{first} * tile.depth, tile.depth, tile.ones});

      if (!summed) {
        turns.wait(b, turn);
        if (turn > 0) load_sum<T>(tile, args, keys, band.block);
      }
      Left by_row = {tile.score_gradient, 1, rows.padded_rows};
      multiply(by_row, Packed{tile.key_packed, keys.end - keys.begin, tile.depth, first}, band.block.rows(), count,
               tile.depth, {tile.query_gradient, tile.depth, turn == 0 && !summed ? nullptr : tile.ones});
      summed = true;
    }
    if (!summed) {  // other queries of the same map blocks see keys of this tile, but no row of the band does
      turns.wait(b, turn);
      if (turn > 0) {
        load_sum<T>(tile, args, keys, band.block);
      } else {
        __builtin_memset(tile.query_gradient, 0, sizeof(float) * band.block.rows() * tile.depth);
      }
    }
    if (turn == band.tile_count - 1) {
      store_query_gradient<T>(tile, args, band.block);
    } else {
      store_sum<T>(tile, args, keys, band.block);
    }
    turns.done(b);
  }

  int64_t at = (keys.batch * p.num_kv_heads + keys.kv_head) * p.key_len + keys.begin;
  int count = keys.end - keys.begin;
  store_rows(tile.key_gradient, tile.depth, p.scale, static_cast<T*>(args.key_gradient) + at * p.head_dim, count,
             p.head_dim);
  store_rows(tile.value_gradient, tile.value_depth, 1.0f, static_cast<T*>(args.value_gradient) + at * p.value_dim,
             count, p.value_dim);
}

// Writes the elements [first, last) of args.delta, which is row-major (*B, H_q, L).
template <typename T>
void compute_delta(const BackwardArgs& args, int64_t first, int64_t last) {
  const AttentionParams& p = args.forward.params;
  const Strides& strides = args.out_gradient_strides;
  for (int64_t row = first; row < last; ++row) {
    int64_t query = row % p.query_len, head = row / p.query_len % p.num_heads, batch = row / p.query_len / p.num_heads;
    const float* out = args.exact_out + batch_offset(p, p.out, batch) + head * p.out.head + query * p.out.row;
    const T* gradient = static_cast<const T*>(args.out_gradient) + batch_offset(p, strides, batch) +
                        head * strides.head + query * strides.row;
    vfloat sum = {};
    for (int c = 0; c < p.value_dim; c += kWidth) {
      sum += load_part(out, p.out.column, c, p.value_dim) * load_part(gradient, strides.column, c, p.value_dim);
    }
    float delta = 0;
    for (int i = 0; i < kWidth; ++i) delta += sum[i];
    const Strides& of_lse = args.lse_gradient_strides;
    int64_t at = batch_offset(p, of_lse, batch) + head * of_lse.head + query * of_lse.row;
    args.delta[row] = delta - args.lse_gradient[at];
  }
}

void delta(const BackwardArgs& args, int64_t first, int64_t last) {
  with_dtype(args.forward.dtype, [&](auto type) { compute_delta<decltype(type)>(args, first, last); });
}
void tile(const BackwardArgs& args, const KeyTile& keys, Turns& turns) {
  with_dtype(args.forward.dtype, [&](auto type) { attend_backward<decltype(type)>(args, keys, turns); });
}

}  // namespace

const BackwardKernels backward_kernels = {kBandRows, kKeyTile, delta, tile};

}  // namespace flashattn::cpu::FLASHATTN_ISA
