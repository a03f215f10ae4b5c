// All CUDA kernels of the gradient share this code. A block computes some rows of the score matrix, its "own" rows, and
// loops over tiles of columns. For dq, rows are queries of one head and columns are keys. For dk and dv, rows are keys
// and columns are queries. The block then sums over some or all heads that share these keys, always in the same order.
// A "first" array is query or key. A "second" array is dout or value. The first sum is dv, the second sum is dq or dk:
//   S = own first @ column first^T      first sum += P @ column second      (only for dv)
//   dP = own second @ column second^T   second sum += dS @ column first     (only for dq and dk)
//
// P replaces S, and dS replaces dP, in the same registers.
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
// Expands to the arguments of GradientBlock's constructor. tile_lists: shared memory for the lists of visible tiles.
#define FLASHATTN_GRADIENT_BLOCK(T, tile_lists)                                                          \
  params, FLASHATTN_MASK_INPUTS, backward,                                                               \
      GradientArrays<T>{query, key, value, dout, saved_rows, dq, dk, dv, dk_parts, dv_parts}, TileList { \
    tile_lists                                                                                           \
  }

namespace flashattn {

// Says what to_gradients() computes: P from S, dS from P and dP, or both. With soft-cap, dS also needs S, which P
// overwrites. So kBoth must then compute P and dS together.
enum Step : int { kToProbabilities, kToGradients, kBoth };

// The index of a head's first element in saved_rows, where each head is padded to a multiple of kSavedTile queries.
FLASHATTN_FUNC int64_t saved_offset(const AttentionParams& params, int batch, int head) {
  return (int64_t(batch) * params.num_heads + head) *
         ((params.query_len + cuda::kSavedTile - 1) / cuda::kSavedTile * cuda::kSavedTile);
}
// Whether sums on tensor cores leave out a query with this maximum, as the forward pass does (see LaneRows). The scores
// are then the same to the last bit. For such a query, stored_row() saves an infinite softmax sum, so P and dS become
// 0. GradientBlock::store() then adds the terms of the query without tensor cores.
FLASHATTN_FUNC bool is_left_out(float row_max) {
  return !has_bias && is_large(row_max);
}
// Packs a SavedRow for saved_rows. saved_row() and saved_row_without_tensor_cores() unpack it.
FLASHATTN_FUNC float4 stored_row(SavedRow saved) {
  return float4{saved.row_max, is_left_out(saved.row_max) ? INFINITY : saved.log2_sum, saved.delta, saved.log2_sum};
}
FLASHATTN_FUNC SavedRow saved_row(float4 stored) {
  return SavedRow{stored.x, stored.y, stored.z};
}
FLASHATTN_FUNC SavedRow saved_row_without_tensor_cores(float4 stored) {
  return SavedRow{stored.x, stored.w, stored.z};
}

// The number of blocks that compute gradients of the same keys. Each of them sums over up to block_heads query heads.
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

// OF: the Gradient to compute. ROWS: rows per block. PARTS: the rows are divided into PARTS equal parts, and each part
// skips tiles that it does not need. COLUMNS: columns per tile. Sizes::is_part: the block writes float32 sums, which
// backward_merge.cu adds up. E: the tensor cores' operand type.
template <typename T, typename Sizes, int ROWS, int PARTS, typename E = T, int OF = Sizes::of>
struct GradientBlock {
  static constexpr bool kOfKeys = OF != kDq, kFirst = OF == kDkAndDv || OF == kDv, kSecond = OF != kDv;

  Visibility visibility;
  const BackwardParams& backward;
  GradientArrays<T> arrays;
  int batch, kv_head, head, heads;  // head: the first of the block's `heads` query heads
  int part;                         // index of the block's sums in dk_parts and dv_parts
  int first_row, last_row;
  KeySpan any;  // from the first to the last column that some row of the block sees

  static constexpr int COLUMNS = Sizes::columns, kOwn = ROWS / PARTS;

  // head: a query head. column: the first column of the tile.
  struct Tile {
    int head, column;
    int n = 0;  // with a block map: the tile's position in its head's list
    ListedTile listed = {0};
  };

  TileList lists;  // with a block map: one list if all heads share the map, otherwise one list per head

  FLASHATTN_FUNC GradientBlock(const AttentionParams& params, MaskInputs masks, const BackwardParams& backward,
                               GradientArrays<T> arrays, TileList lists)
      : backward(backward), arrays(arrays), lists(lists) {
    int group = params.num_heads / params.num_kv_heads, chunks = kOfKeys ? head_chunks(params, backward) : 1;
    BlockPosition block = block_position(params, kOfKeys ? params.num_kv_heads * chunks : params.num_heads);
    batch = block.batch;
    kv_head = block.head / (kOfKeys ? chunks : group);
    int chunk = kOfKeys ? block.head % chunks : 0;
    int before = chunk * backward.block_heads;
    head = kOfKeys ? kv_head * group + before : block.head;
    heads = kOfKeys ? minimum(backward.block_heads, group - before) : 1;
    part = (chunk * int(params.batch_size) + batch) * params.num_kv_heads + kv_head;
    first_row = kOfKeys ? block.part * ROWS : first_query(params, block.part, ROWS);
    last_row = minimum(first_row + ROWS, kOfKeys ? params.key_len : params.query_len) - 1;
    visibility = visibility_of(params, masks, batch);
    any = columns_of(first_row, last_row);
  }

  FLASHATTN_FUNC const AttentionParams& params() const { return *visibility.params; }
  // If there is a block map, lists the visible tiles. All THREADS threads of the block call find() and then
  // synchronise.
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
  // The block loops over its query heads and, for each head, over the tiles that the block map does not hide.
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
  // Whether some row of part own_part sees a column of the tile. own_any: the columns that the rows of the part see.
  FLASHATTN_FUNC bool is_needed(Tile tile, int own_part, KeySpan own_any) const {
    return own_any.meets(tile.column, COLUMNS) && (!has_block_map || tile.listed.shows(own_part));
  }

  FLASHATTN_FUNC PlainRows<const T*> rows(const T* array, const Strides& strides, int of_head) const {
    return rows_of(array, params(), strides, batch, of_head);
  }
  FLASHATTN_FUNC PlainRows<const T*> queries(int h) const { return rows(arrays.query, params().query, h); }
  FLASHATTN_FUNC PlainRows<const T*> douts(int h) const { return rows(arrays.dout, backward.dout, h); }
  FLASHATTN_FUNC PlainRows<const T*> keys() const { return rows(arrays.key, params().key, kv_head); }
  FLASHATTN_FUNC PlainRows<const T*> values() const { return rows(arrays.value, params().value, kv_head); }
  // First arrays (query, key) have head_dim columns, second arrays (dout, value) value_dim columns. h: a query head.
  FLASHATTN_FUNC PlainRows<const T*> own_first(int h) const { return kOfKeys ? keys() : queries(h); }
  FLASHATTN_FUNC PlainRows<const T*> own_second(int h) const { return kOfKeys ? values() : douts(h); }
  FLASHATTN_FUNC PlainRows<const T*> columns_first(int h) const { return kOfKeys ? queries(h) : keys(); }
  FLASHATTN_FUNC PlainRows<const T*> columns_second(int h) const { return kOfKeys ? douts(h) : values(); }
  FLASHATTN_FUNC const float4* saved(int h) const { return arrays.saved_rows + saved_offset(params(), batch, h); }

  // The span of columns that the rows from `first` to `last` see.
  FLASHATTN_FUNC KeySpan columns_of(int first, int last) const {
    return kOfKeys ? visibility.seen_from(first, last) : visibility.seen_by_any(first, last);
  }
  // Whether masks neither hide nor change any score of the tile in the rows of part own_part.
  FLASHATTN_FUNC bool is_unmasked(Tile tile, int own_part) const {
    int row = first_row + own_part * kOwn, column = tile.column;
    int first = kOfKeys ? column : row, last = minimum(first + (kOfKeys ? COLUMNS : kOwn), params().query_len) - 1;
    return visibility.unmasked(first, last).contains(kOfKeys ? row : column, kOfKeys ? kOwn : COLUMNS) &&
           !(has_block_map && tile.listed.changes(own_part));
  }

  // A lane's data about two of the warp's 16 rows. Four lanes share these two rows.
  struct OwnRows {
    KeySpan columns[2];  // the columns that each of the two rows sees
    Row queries[2];      // `queries` and `saved` are set only if the rows are queries
    SavedRow saved[2];
    float largest;                          // the largest abs(row_max) of all queries so far
    VisibleBits<kOfKeys, COLUMNS> visible;  // the bool array's entries for the current tile; look() loads them
  };
  // own_row: the first of the warp's rows.
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

  // Returns is_unmasked(). If that is false, starts to load the tile's entries of the bool array for to_gradients().
  // The caller computes the tile's products in between, to hide the latency.
  FLASHATTN_FUNC bool look(OwnRows& own, int own_part, int own_row, Tile tile, int lane) const {
    bool unmasked = is_unmasked(tile, own_part);
    if constexpr (has_visible && kOfKeys) {
      if (!unmasked) own.visible.read(visibility, tile.head, tile.column, own_row, lane);
    } else if constexpr (has_visible) {
      if (!unmasked) own.visible.read(visibility, own.queries, tile.column, lane);
    }
    return unmasked;
  }

  // If the columns are queries, updates own.largest with the row_max of the tile's queries.
  FLASHATTN_FUNC void take_columns(OwnRows& own, const float4* saved_columns, int lane) const {
    if constexpr (kOfKeys) {
      FLASHATTN_UNROLL
      for (int i = 0; i < COLUMNS; i += FLASHATTN_LANES) {
        own.largest = maximum(own.largest, fabsf(saved_columns[i + lane % COLUMNS].x));
      }
    }
  }

  // Replaces `scores` (S) with P, `dscores` (dP) with dS, or both, see Step. Both hold a warp's rows and a tile's
  // columns. saved_columns: the tile's saved_rows, if the columns are queries. unmasked: is_unmasked() of the tile.
  template <Step STEP, int N>
  FLASHATTN_FUNC void to_gradients(Fragment (&scores)[N], Fragment (&dscores)[N], OwnRows& own, int own_row,
                                   const float4* saved_columns, Tile tile, bool unmasked, int lane) const {
    if constexpr (has_visible && STEP != kToGradients && kOfKeys) {
      if (!unmasked) own.visible.take(lane);
    } else if constexpr (has_visible && STEP != kToGradients) {
      if (!unmasked) own.visible.take(own.queries, tile.column, lane);
    }
    if (unmasked) {  // the compiler removes the code for masks here
      each_score<STEP>(scores, dscores, own, own_row, saved_columns, tile, true, lane);
    } else {
      each_score<STEP>(scores, dscores, own, own_row, saved_columns, tile, false, lane);
    }
  }

  // first_target() and second_target() return where to write a row of the first or second sum. This is the output array
  // or, if Sizes::is_part, float32 scratch.
  FLASHATTN_FUNC auto* first_target(int row) const {
    if constexpr (Sizes::is_part != 0) {
      return arrays.dv_parts + (int64_t(part) * params().key_len + row) * value_dim;
    } else {
      return row_of(arrays.dv, params(), backward.dv, batch, kv_head, row);
    }
  }
  FLASHATTN_FUNC auto* second_target(int row) const {
    if constexpr (Sizes::is_part != 0) {
      return arrays.dk_parts + (int64_t(part) * params().key_len + row) * head_dim;
    } else {
      return kOfKeys ? row_of(arrays.dk, params(), backward.dk, batch, kv_head, row)
                     : row_of(arrays.dq, params(), backward.dq, batch, head, row);
    }
  }

  // Writes a warp's 16 rows of the sums. For a hidden score, tensor cores multiply by 0, and 0 times NaN is NaN. So
  // rows that are not finite are recomputed without tensor cores. largest: own.largest after the last tile.
  template <int N, int M>
  FLASHATTN_FUNC void store(const Fragment (&first)[N], const Fragment (&second)[M], float largest, int own_row,
                            int lane) const {
    bool not_finite[2], add[2], add_any = __any_sync(~0u, is_left_out(largest)) != 0;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      int row = own_row + lane / 4 + h * kRowStep;
      float probe = 0;  // becomes NaN with the first number that is not finite
      if constexpr (kFirst) probe += probe_of(first, h);
      if constexpr (kSecond) probe += probe_of(second, h);
      bool finite = lane_sum<kRowLanes>(probe) == 0;
      not_finite[h] = row <= last_row && !finite;
      add[h] = add_any && row <= last_row && finite;
      if (row > last_row || not_finite[h]) continue;
      if constexpr (kFirst) store_columns<E, value_dim, sizeof(T) == 2>(first_target(row), first, h, 1.0f, lane);
      if constexpr (kSecond)
        store_columns<E, head_dim, sizeof(T) == 2>(second_target(row), second, h, params().scale, lane);
    }
    // Lanes 4 n to 4 n + 3 share two rows. Bit 4 n of `again` stands for the first row, bit 4 n + 1 for the
    // second row. One loop handles both `not_finite` and `add`, so compute_again() is inlined only once.
    const auto bits_of = [](const bool(&rows)[2]) {
      return (__ballot_sync(~0u, rows[0]) & 0x11111111) | (__ballot_sync(~0u, rows[1]) & 0x11111111) << 1;
    };
    uint again = bits_of(not_finite);
    for (uint left = again | bits_of(add); left != 0; left &= left - 1) {
      int bit = __ffs(left) - 1;
      compute_again(own_row + bit / kRowLanes + bit % kRowLanes * kRowStep, (again >> bit & 1) == 0, lane);
    }
  }

 private:
  FLASHATTN_FUNC int first_column() const { return any.begin / COLUMNS * COLUMNS; }
  FLASHATTN_FUNC int tile_count() const { return (any.end - first_column() + COLUMNS - 1) / COLUMNS; }
  // The bitwise OR of the block map's bytes for a part of the rows and a tile of columns.
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
  // Moves to entry tile.n of the head's list. At the list's end, moves to the next head whose list is not empty.
  FLASHATTN_FUNC void take(Tile& tile) const {
    for (; is_there(tile); ++tile.head, tile.n = 0) {
      tile.listed = list_of(tile.head)[tile.n];
      if (!tile.listed.exists()) continue;
      tile.column = first_column() + tile.listed.tile() * COLUMNS;
      return;
    }
  }

  // Whether a span or the bool array hides the lane's score i of a tile. With a bool array, own.visible covers the
  // array and, if the rows are queries, also the spans. Queries beyond the last one need not be hidden: their saved sum
  // is infinite, so P and dS are 0. But a tree or an additive array has no entries for such queries, so the spans must
  // hide them.
  FLASHATTN_FUNC bool is_hidden(const OwnRows& own, int i, int column) const {
    constexpr bool kBitsSuffice =
        has_visible &&
        (!kOfKeys || !(has_causal || has_window || has_key_start || has_key_stop || has_tree || has_bias));
    return (!kBitsSuffice && !own.columns[i % 4 / 2].contains(column, 1)) || (has_visible && !own.visible[i]);
  }

  template <Step STEP, int N>
  FLASHATTN_FUNC void each_score(Fragment (&scores)[N], Fragment (&dscores)[N], const OwnRows& own, int own_row,
                                 const float4* saved_columns, Tile tile, bool unmasked, int lane) const {
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
        // As in LaneRows, the product of score and factor is not rounded before the maximum is subtracted.
        float exact = multiply_add(score, visibility.factor, -of_query.row_max);
        score = visibility.score_of_scaled(scaled, row, key_index);
        bool hidden = !unmasked && is_hidden(own, i, column);
        if ((has_tree || has_bias) && !unmasked && !hidden) {
          score = visibility.masked_by_arrays(score, row, key_index, true);
          hidden = score == -INFINITY;
        }
        float difference = visibility.has_plain_scores() ? exact : score - of_query.row_max;
        score = unmasked ? fast_exp2(exponent_of(difference, of_query)) : probability_of(difference, of_query, hidden);
      }
      if (STEP != kToProbabilities) {
        dscore = gradient_of(score, dscore, visibility.derivative(scaled), of_query, unmasked);
      }
    }
  }

  // Recomputes one row without tensor cores. Each lane computes some of the head_dim and value_dim columns, as in
  // DecodeRows. If `add` is true, sums only over queries for which is_left_out() is true, and adds the sums to the
  // stored row.
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
    __syncwarp();  // from here on, a lane can read columns that other lanes have stored
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
  template <typename Result, int N>
  static FLASHATTN_FUNC void store_lanes(Result* target, const float (&sums)[N], float factor, int columns, bool add,
                                         int lane) {
    FLASHATTN_UNROLL
    for (int i = 0; i < N; ++i) {
      int column = lane * N + i;
      if (column < columns) target[column] = Result(multiply_add(sums[i], factor, add ? float(target[column]) : 0.0f));
    }
  }
};

}  // namespace flashattn
