// The gradient's kernels share this code. A block has its own rows and loops over tiles of columns. For dq the rows are
// queries of a head, and the columns its keys. For dk and dv the rows are keys, and the columns the queries of heads
// that share them; so the block sums over these heads, always in the same order.
//
//   S = own query or key . columns'   dP = own dout or value . columns'   second += dS . columns' key or query
//                                                                         first += P . columns' dout
//
// first is dv, second dq or dk. P and dS replace S and dP in their registers.
#pragma once

#include "kernel.h"
#include "mapped_tiles.h"
#include "score_gradient.h"
#include "warp_rows.h"

#define FLASHATTN_BACKWARD_ARGUMENTS(T)      \
  FLASHATTN_VALUE(BackwardParams, backward); \
  FLASHATTN_READ(T, dout);                   \
  FLASHATTN_READ(float4, saved_rows);        \
  FLASHATTN_WRITTEN(T, dq);                  \
  FLASHATTN_WRITTEN(T, dk);                  \
  FLASHATTN_WRITTEN(T, dv);                  \
  FLASHATTN_WRITTEN(float, dk_parts);        \
  FLASHATTN_WRITTEN(float, dv_parts)
// The arguments of GradientBlock's constructor, from the kernel's.
#define FLASHATTN_GRADIENT_BLOCK(T, tile_lists)                                                          \
  params, FLASHATTN_MASK_INPUTS, backward,                                                               \
      GradientArrays<T>{query, key, value, dout, saved_rows, dq, dk, dv, dk_parts, dv_parts}, TileList { \
    tile_lists                                                                                           \
  }

namespace flashattn {

constexpr FLASHATTN_FUNC bool is_of_keys(int of) {
  return of != kDq;
}
constexpr FLASHATTN_FUNC bool has_first(int of) {
  return of == kDkAndDv || of == kDv;
}
constexpr FLASHATTN_FUNC bool has_second(int of) {
  return of != kDv;
}

// The steps of to_gradients(). With soft-cap they are one, since its derivative needs the score.
enum Step : int { kToProbabilities, kToGradients, kBoth };

// The offset of a head's saved rows. Each head has whole tiles of queries.
FLASHATTN_FUNC int64_t saved_offset(const AttentionParams& params, int batch, int head) {
  return (int64_t(batch) * params.num_heads + head) *
         ((params.query_len + cuda::kSavedTile - 1) / cuda::kSavedTile * cuda::kSavedTile);
}
// Maximum and sum stay two numbers: next to a large maximum, one number would round the sum away. For rows with a
// large maximum, the forward pass does without tensor cores, see LaneRows, and scores must equal its to the last bit.
// So tensor cores get an infinite sum for such rows, which makes P and dS 0, and store() adds what they contribute.
FLASHATTN_FUNC bool is_left_out(float row_max) {
  return !has_bias && is_large(row_max);
}
FLASHATTN_FUNC float4 stored_row(SavedRow saved) {
  return float4{saved.row_max, is_left_out(saved.row_max) ? INFINITY : saved.log2_sum, saved.delta, saved.log2_sum};
}
FLASHATTN_FUNC SavedRow saved_row(float4 stored) {
  return SavedRow{stored.x, stored.y, stored.z};
}
FLASHATTN_FUNC SavedRow saved_row_without_tensor_cores(float4 stored) {
  return SavedRow{stored.x, stored.w, stored.z};
}

// How many blocks have the same keys, each with some of a group's heads.
FLASHATTN_FUNC int head_chunks(const AttentionParams& params, const BackwardParams& backward) {
  return (params.num_heads / params.num_kv_heads + backward.block_heads - 1) / backward.block_heads;
}

template <typename T>
struct GradientArrays {
  const T *query, *key, *value, *dout;
  const float4* saved_rows;
  T *dq, *dk, *dv;
  float *dk_parts, *dv_parts;
};

// A row of a result: of an output, or of a float32 sum over some heads.
template <typename T, bool IS_PART>
struct GradientRow {
  T* row;
  float* part;

  FLASHATTN_FUNC float load(int column) const {
    if constexpr (IS_PART) {
      return part[column];
    } else {
      return float(row[column]);
    }
  }
  FLASHATTN_FUNC void store(int column, float x) const {
    if constexpr (IS_PART) {
      part[column] = x;
    } else {
      row[column] = T(x);
    }
  }
  // Two neighbouring columns; the first is even.
  FLASHATTN_FUNC void store_pair(int column, float x, float y) const {
    if constexpr (IS_PART) {
      *reinterpret_cast<float2*>(part + column) = {x, y};
    } else {
      *reinterpret_cast<uint*>(row + column) = rounded_pair<T>(x, y);
    }
  }
};

// OF: a Gradient. ROWS: rows of the block, in PARTS equal parts, each of which skips tiles on its own. COLUMNS: columns
// per tile. IS_PART: blocks of keys leave float32 for backward_merge.cu. E: operand type of the tensor cores.
template <typename T, int OF, int ROWS, int PARTS, int COLUMNS, bool IS_PART, typename E = T>
struct GradientBlock {
  static constexpr bool kOfKeys = is_of_keys(OF), kFirst = has_first(OF), kSecond = has_second(OF);

  Visibility visibility;
  const BackwardParams& backward;
  GradientArrays<T> arrays;
  int batch, kv_head, head, heads;  // head: the block's first query head
  int part;                         // in dk_parts and dv_parts: the number of the sum
  int first_row, last_row;
  KeySpan any;  // the columns that at least one of the rows has a score with

  static constexpr int kOwn = ROWS / PARTS;

  // A tile: its query head and its first column.
  struct Tile {
    int head, column;
    int n = 0;  // with a block map: how many listed tiles of this head come before
    ListedTile listed = {0};
  };

  TileList lists;  // with a block map: one list if all heads share the map, else one for each

  FLASHATTN_FUNC GradientBlock(const AttentionParams& p, MaskInputs masks, const BackwardParams& backward,
                               GradientArrays<T> arrays, TileList lists)
      : backward(backward), arrays(arrays), lists(lists) {
    int group = p.num_heads / p.num_kv_heads, chunks = kOfKeys ? head_chunks(p, backward) : 1;
    BlockPosition block = block_position(p, kOfKeys ? p.num_kv_heads * chunks : p.num_heads);
    batch = block.batch;
    kv_head = block.head / (kOfKeys ? chunks : group);
    int chunk = kOfKeys ? block.head % chunks : 0;
    int before = chunk * backward.block_heads;
    head = kOfKeys ? kv_head * group + before : block.head;
    heads = kOfKeys ? minimum(backward.block_heads, group - before) : 1;
    part = (chunk * int(p.batch_size) + batch) * p.num_kv_heads + kv_head;
    first_row = kOfKeys ? block.part * ROWS : first_query(p, block.part, ROWS);
    last_row = minimum(first_row + ROWS, kOfKeys ? p.key_len : p.query_len) - 1;
    visibility = visibility_of(p, masks, batch);
    any = columns_of(first_row, last_row);
  }

  FLASHATTN_FUNC const AttentionParams& params() const { return *visibility.params; }
  // With a block map: lists the tiles. All THREADS threads of the block call it, and must synchronise afterwards.
  template <int THREADS>
  FLASHATTN_FUNC void find() const {
    if constexpr (has_block_map) {
      int last = params().block_map.head == 0 ? head : head + heads - 1;
      for (int of_head = head; of_head <= last; ++of_head) {
        list_of(of_head).template find<THREADS, PARTS>(tile_count(),
                                                       [&](int tile, int part) { return blocks(of_head, tile, part); });
      }
    }
  }
  // The loop over tiles: for each head all tiles of its columns, in order, except those that the block map hides.
  FLASHATTN_FUNC Tile first_tile() const {
    Tile tile = {any.begin < any.end ? head : head + heads, first_column()};
    if (has_block_map) take(tile);
    return tile;
  }
  FLASHATTN_FUNC Tile next_tile(Tile tile) const {
    if (has_block_map) {
      ++tile.n;
      take(tile);
    } else {
      tile.column += COLUMNS;
      if (tile.column >= any.end) tile = {tile.head + 1, first_column()};
    }
    return tile;
  }
  FLASHATTN_FUNC bool is_there(Tile tile) const { return tile.head < head + heads; }
  // Whether the tile has scores for this part's rows. own_any: the columns with which these rows have scores.
  FLASHATTN_FUNC bool is_needed(Tile tile, int own_part, KeySpan own_any) const {
    return own_any.meets(tile.column, COLUMNS) && (!has_block_map || tile.listed.shows(own_part));
  }

  FLASHATTN_FUNC PlainRows<const T*> rows(const T* array, const Strides& strides, int of_head) const {
    return {head_of(array, params(), strides, batch, of_head), row_layout(strides)};
  }
  FLASHATTN_FUNC PlainRows<const T*> queries(int h) const { return rows(arrays.query, params().query, h); }
  FLASHATTN_FUNC PlainRows<const T*> douts(int h) const { return rows(arrays.dout, backward.dout, h); }
  FLASHATTN_FUNC PlainRows<const T*> keys() const { return rows(arrays.key, params().key, kv_head); }
  FLASHATTN_FUNC PlainRows<const T*> values() const { return rows(arrays.value, params().value, kv_head); }
  // first: queries or keys, with head_dim columns. second: dout or values, with value_dim columns. h: a query head.
  FLASHATTN_FUNC PlainRows<const T*> own_first(int h) const { return kOfKeys ? keys() : queries(h); }
  FLASHATTN_FUNC PlainRows<const T*> own_second(int h) const { return kOfKeys ? values() : douts(h); }
  FLASHATTN_FUNC PlainRows<const T*> columns_first(int h) const { return kOfKeys ? queries(h) : keys(); }
  FLASHATTN_FUNC PlainRows<const T*> columns_second(int h) const { return kOfKeys ? douts(h) : values(); }
  FLASHATTN_FUNC const float4* saved(int h) const { return arrays.saved_rows + saved_offset(params(), batch, h); }

  // The columns that at least one of the rows first..last has a score with.
  FLASHATTN_FUNC KeySpan columns_of(int first, int last) const {
    return kOfKeys ? visibility.seen_from(first, last) : visibility.seen_by_any(first, last);
  }
  // Whether the mask hides nothing between the part's rows and a tile of columns, and arrays change no score.
  FLASHATTN_FUNC bool is_open(Tile tile, int own_part) const {
    int row = first_row + own_part * kOwn, column = tile.column;
    int first = kOfKeys ? column : row, last = minimum(first + (kOfKeys ? COLUMNS : kOwn), params().query_len) - 1;
    return visibility.open_to_all(first, last).contains(kOfKeys ? row : column, kOfKeys ? kOwn : COLUMNS) &&
           !(has_block_map && tile.listed.changes(own_part));
  }

  // A lane keeps these for its two rows of the warp's 16, which start at own_row.
  struct OwnRows {
    KeySpan columns[2];  // the columns that the row has scores with
    Row queries[2];      // these and `saved`: only if the rows are queries
    SavedRow saved[2];
    float largest;  // the largest abs(row_max) that probabilities are computed from
    typename VisibleBits<kOfKeys, COLUMNS>::Bits visible;  // for the tile that look() was called for
  };
  FLASHATTN_FUNC OwnRows own_rows(int own_row, int lane) const {
    OwnRows own;
    own.largest = 0;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      int row = own_row + lane / 4 + h * kRowStep;
      own.columns[h] = row <= last_row ? columns_of(row, row) : KeySpan{0, 0};
      if (!kOfKeys) {
        own.queries[h] = visibility.row(row, head);
        own.saved[h] = row <= last_row ? saved_row(saved(head)[row]) : SavedRow{0, INFINITY, 0};
        own.largest = maximum(own.largest, fabsf(own.saved[h].row_max));
      }
    }
    return own;
  }

  // Returns whether nothing is hidden in a tile. Otherwise starts to load the bool array's entries, so early that they
  // have arrived when needed.
  FLASHATTN_FUNC bool look(OwnRows& own, int own_part, int own_row, Tile tile, int lane) const {
    bool shown = is_open(tile, own_part);
    if constexpr (has_visible && kOfKeys) {
      if (!shown) own.visible.read(visibility, tile.head, tile.column, own_row, lane);
    } else if constexpr (has_visible) {
      if (!shown) own.visible.read(visibility, own.queries, tile.column, lane);
    }
    return shown;
  }

  // Updates own.largest; called before a tile's first step.
  FLASHATTN_FUNC void take_columns(OwnRows& own, const float4* saved_columns, int lane) const {
    if constexpr (kOfKeys) {
      FLASHATTN_UNROLL
      for (int i = 0; i < COLUMNS; i += FLASHATTN_LANES) {
        own.largest = maximum(own.largest, fabsf(saved_columns[i + lane % COLUMNS].x));
      }
    }
  }

  // Turns S into P, or dP into dS where S is already P, or both, for a warp's rows and a tile. saved_columns: the saved
  // rows of the tile's queries, if the rows are keys.
  template <Step STEP, int N>
  FLASHATTN_FUNC void to_gradients(Fragment (&scores)[N], Fragment (&dscores)[N], OwnRows& own, int own_row,
                                   const float4* saved_columns, Tile tile, bool shown, int lane) const {
    if constexpr (has_visible && STEP != kToGradients) {
      if (!shown) take_visible(own, tile, lane);
    }
    if (shown) {  // compiles without the mask's code
      each_score<STEP>(scores, dscores, own, own_row, saved_columns, tile, true, lane);
    } else {
      each_score<STEP>(scores, dscores, own, own_row, saved_columns, tile, false, lane);
    }
  }

  FLASHATTN_FUNC GradientRow<T, IS_PART> first_target(int row) const {
    return {row_of(arrays.dv, params(), backward.dv, batch, kv_head, row),
            arrays.dv_parts + (int64_t(part) * params().key_len + row) * value_dim};
  }
  FLASHATTN_FUNC GradientRow<T, IS_PART> second_target(int row) const {
    return {kOfKeys ? row_of(arrays.dk, params(), backward.dk, batch, kv_head, row)
                    : row_of(arrays.dq, params(), backward.dq, batch, head, row),
            arrays.dk_parts + (int64_t(part) * params().key_len + row) * head_dim};
  }

  // Writes a warp's 16 rows. Tensor cores multiply what is hidden by 0, and 0 times NaN is NaN: so rows that are not
  // finite are recomputed without tensor cores. largest: the largest abs(row_max) that the rows have met.
  template <int N, int M>
  FLASHATTN_FUNC void store(const Fragment (&first)[N], const Fragment (&second)[M], float largest, int own_row,
                            int lane) const {
    bool spoilt[2], add[2], add_any = __any_sync(~0u, is_left_out(largest)) != 0;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      int row = own_row + lane / 4 + h * kRowStep;
      float probe = 0;  // becomes NaN with the first number that is not finite
      if constexpr (kFirst) probe += probe_of(first, h);
      if constexpr (kSecond) probe += probe_of(second, h);
      bool finite = lane_sum<kRowLanes>(probe) == 0;
      spoilt[h] = row <= last_row && !finite;
      add[h] = add_any && row <= last_row && finite;
      if (row > last_row || spoilt[h]) continue;
      if constexpr (kFirst) store_columns<value_dim>(first_target(row), first, h, 1.0f, lane);
      if constexpr (kSecond) store_columns<head_dim>(second_target(row), second, h, params().scale, lane);
    }
    // Bit n: lane n's first row if n % 4 is 0, its second if 1. One loop, since compute_again() is inlined.
    const auto bits_of = [](const bool(&rows)[2]) {
      return (__ballot_sync(~0u, rows[0]) & 0x11111111) | (__ballot_sync(~0u, rows[1]) & 0x11111111) << 1;
    };
    uint again = bits_of(spoilt);
    for (uint left = again | bits_of(add); left != 0; left &= left - 1) {
      int bit = __ffs(left) - 1;
      compute_again(own_row + bit / kRowLanes + bit % kRowLanes * kRowStep, (again >> bit & 1) == 0, lane);
    }
  }

 private:
  FLASHATTN_FUNC void take_visible(OwnRows& own, Tile tile, int lane) const {
    if constexpr (kOfKeys) {
      own.visible.take(lane);
    } else {
      own.visible.take(own.queries, tile.column, lane);
    }
  }

  FLASHATTN_FUNC int first_column() const { return any.begin / COLUMNS * COLUMNS; }
  FLASHATTN_FUNC int tile_count() const { return (any.end - first_column() + COLUMNS - 1) / COLUMNS; }
  // Returns the block map's byte for a part of the rows and a tile of columns.
  FLASHATTN_FUNC int blocks(int of_head, int tile, int own_part) const {
    int column = first_column() + tile * COLUMNS, count = kOfKeys ? params().query_len : params().key_len;
    Range rows = Range{first_row, last_row}.template part<kOwn>(own_part);
    Range columns = {column, minimum(column + COLUMNS, count) - 1};
    return kOfKeys ? blocks_between<COLUMNS, kOwn>(visibility, of_head, columns, rows)
                   : blocks_between<kOwn, COLUMNS>(visibility, of_head, rows, columns);
  }
  FLASHATTN_FUNC TileList list_of(int of_head) const {
    return {lists.words + (params().block_map.head == 0 ? 0 : (of_head - head) * (tile_count() + 1))};
  }
  // Moves to tile n of the head's list, or to the first tile of the next head that has any.
  FLASHATTN_FUNC void take(Tile& tile) const {
    for (; is_there(tile); ++tile.head, tile.n = 0) {
      tile.listed = list_of(tile.head)[tile.n];
      if (!tile.listed.exists()) continue;
      tile.column = first_column() + tile.listed.tile() * COLUMNS;
      return;
    }
  }

  // Whether spans or the bool array hide a lane's score i of a tile. If rows are queries, the bits include the spans.
  // If rows are keys, the bits are the array's alone. Queries beyond the last then need no check, because their saved
  // sum is infinite; but a tree or an additive array must not be read for them.
  FLASHATTN_FUNC bool is_hidden(const OwnRows& own, int i, int column) const {
    constexpr bool kBitsOfAll =
        has_visible &&
        (!kOfKeys || !(has_causal || has_window || has_key_start || has_key_stop || has_tree || has_bias));
    return (!kBitsOfAll && !own.columns[i % 4 / 2].contains(column, 1)) || (has_visible && !own.visible[i]);
  }

  template <Step STEP, int N>
  FLASHATTN_FUNC void each_score(Fragment (&scores)[N], Fragment (&dscores)[N], const OwnRows& own, int own_row,
                                 const float4* saved_columns, Tile tile, bool shown, int lane) const {
    float slope = has_alibi_slopes ? visibility.row(0, tile.head).slope : 0.0f;
    FLASHATTN_UNROLL
    for (int i = 0; i < COLUMNS / 2; ++i) {
      int h = i % 4 / 2, in_tile = i / 4 * 8 + lane % 4 * 2 + i % 2, column = tile.column + in_tile;
      Row row = kOfKeys ? visibility.row_with_slope(column, tile.head, slope) : own.queries[h];
      SavedRow of_query = kOfKeys ? saved_row(saved_columns[in_tile]) : own.saved[h];
      int key_index = kOfKeys ? own_row + lane / 4 + h * kRowStep : column;
      float &score = scores[i / 4][i % 4], &dscore = dscores[i / 4][i % 4];
      float scaled = STEP == kToGradients ? 0.0f : visibility.scaled(score);
      if (STEP != kToGradients) {
        float exact = multiply_add(score, visibility.factor, -of_query.row_max);  // as LaneRows computes it
        score = visibility.score_of_scaled(scaled, row, key_index);
        bool hidden = !shown && is_hidden(own, i, column);
        if ((has_tree || has_bias) && !shown && !hidden) {
          score = visibility.masked_by_arrays(score, row, key_index, true);
          hidden = score == -INFINITY;
        }
        float difference = visibility.has_plain_scores() ? exact : score - of_query.row_max;
        score = shown ? fast_exp2(exponent_of(difference, of_query)) : probability_of(difference, of_query, hidden);
      }
      if (STEP != kToProbabilities) {
        dscore = gradient_of(score, dscore, visibility.derivative(scaled), of_query, shown);
      }
    }
  }

  template <int N>
  static FLASHATTN_FUNC float probe_of(const Fragment (&sums)[N], int h) {
    float probe = 0;
    FLASHATTN_UNROLL
    for (int c = 0; c < N; ++c) probe = multiply_add(sums[c][2 * h], 0, multiply_add(sums[c][2 * h + 1], 0, probe));
    return probe;
  }

  // Stores the first WIDTH columns of one of the lane's two rows.
  template <int WIDTH, int N>
  static FLASHATTN_FUNC void store_columns(GradientRow<T, IS_PART> target, const Fragment (&sums)[N], int h,
                                           float factor, int lane) {
    FLASHATTN_UNROLL
    for (int c = 0; c < N; ++c) {
      int column = output_column<E>(c, lane);
      float x = sums[c][2 * h] * factor, y = sums[c][2 * h + 1] * factor;
      if constexpr (sizeof(T) == 2 && WIDTH % 2 == 0) {
        if (column < WIDTH) target.store_pair(column, x, y);
      } else {
        if (column < WIDTH) target.store(column, x);
        if (column + kNext<E> < WIDTH) target.store(column + kNext<E>, y);
      }
    }
  }

  // Recomputes one row without tensor cores. The lanes of a warp share the columns of its arrays as in DecodeRows. add:
  // adds to the stored row only what tensor cores have left out.
  FLASHATTN_FUNC void compute_again(int row, bool add, int lane) const {
    constexpr int kDepth = whole_lanes(head_dim) / FLASHATTN_LANES, kWidth = whole_lanes(value_dim) / FLASHATTN_LANES;
    float own[kDepth], own_other[kWidth], first[kWidth] = {}, second[kDepth] = {};
    load(own, own_first(head), row, head_dim, lane);
    load(own_other, own_second(head), row, value_dim, lane);
    KeySpan columns = columns_of(row, row);
    FLASHATTN_ROLLED
    for (int h = head; h < head + heads; ++h) {
      FLASHATTN_ROLLED
      for (int column = columns.begin; column < columns.end; ++column) {
        float theirs[kDepth], theirs_other[kWidth];
        int query_index = kOfKeys ? column : row, key_index = kOfKeys ? row : column;
        SavedRow of_query = saved_row_without_tensor_cores(saved(h)[query_index]);
        if (add && !is_left_out(of_query.row_max)) continue;
        load(theirs, columns_first(h), column, head_dim, lane);
        load(theirs_other, columns_second(h), column, value_dim, lane);
        ScoreGradient result = score_gradient(product_of(own, theirs), product_of(own_other, theirs_other), visibility,
                                              visibility.row(query_index, h), of_query, key_index, false);
        if (result.probability != 0) add_row(first, result.probability, theirs_other);
        if (result.gradient != 0) add_row(second, result.gradient, theirs);
      }
    }
    __syncwarp();  // other lanes' writes have arrived
    if (kFirst) store_lanes(first_target(row), first, 1.0f, value_dim, add, lane);
    if (kSecond) store_lanes(second_target(row), second, params().scale, head_dim, add, lane);
  }
  template <int N>
  static FLASHATTN_FUNC void load(float (&to)[N], PlainRows<const T*> rows, int row, int columns, int lane) {
    FLASHATTN_UNROLL
    for (int i = 0; i < N; ++i) {
      int column = lane * N + i;
      to[i] = column < columns ? rows.element(row, column) : 0.0f;
    }
  }
  template <int N>
  static FLASHATTN_FUNC float product_of(const float (&a)[N], const float (&b)[N]) {
    float sum = 0;
    FLASHATTN_UNROLL
    for (int i = 0; i < N; ++i) sum = multiply_add(a[i], b[i], sum);
    return lane_sum<FLASHATTN_LANES>(sum);
  }
  template <int N>
  static FLASHATTN_FUNC void add_row(float (&sums)[N], float by, const float (&row)[N]) {
    FLASHATTN_UNROLL
    for (int i = 0; i < N; ++i) sums[i] = multiply_add(by, row[i], sums[i]);
  }
  template <int N>
  static FLASHATTN_FUNC void store_lanes(GradientRow<T, IS_PART> target, const float (&sums)[N], float factor,
                                         int columns, bool add, int lane) {
    FLASHATTN_UNROLL
    for (int i = 0; i < N; ++i) {
      int column = lane * N + i;
      if (column < columns) target.store(column, multiply_add(sums[i], factor, add ? target.load(column) : 0.0f));
    }
  }
};

}  // namespace flashattn
