// What the two passes of the gradient have alike: which arrays are a block's rows and which its columns, and a row's
// gradients without tensor cores.
#pragma once

#include "kernel.h"
#include "score_gradient.h"
#include "warp_rows.h"

namespace flashattn {

// What a launch computes.
enum Gradient : int { kDq, kDkAndDv, kDk, kDv };
constexpr FLASHATTN_FUNC bool is_of_keys(int of) {
  return of != kDq;
}
constexpr FLASHATTN_FUNC bool has_first(int of) {
  return of == kDkAndDv || of == kDv;
}
constexpr FLASHATTN_FUNC bool has_second(int of) {
  return of != kDv;
}

template <typename T, int OF>
struct GradientRows {
  static constexpr bool kOfKeys = is_of_keys(OF);

  Visibility visibility;
  const BackwardParams& backward;
  const T* query;
  const T* key;
  const T* value;
  const T* dout;
  const float* row_stats;
  const float* delta;
  int batch;
  int kv_head;

  FLASHATTN_FUNC const AttentionParams& params() const { return *visibility.params; }
  FLASHATTN_FUNC PlainRows<const T*> rows(const T* array, const Strides& strides, int head) const {
    return {head_of(array, params(), strides, batch, head), row_layout(strides)};
  }
  FLASHATTN_FUNC PlainRows<const T*> queries(int head) const { return rows(query, params().query, head); }
  FLASHATTN_FUNC PlainRows<const T*> douts(int head) const { return rows(dout, backward.dout, head); }
  FLASHATTN_FUNC PlainRows<const T*> keys() const { return rows(key, params().key, kv_head); }
  FLASHATTN_FUNC PlainRows<const T*> values() const { return rows(value, params().value, kv_head); }

  // Of head_dim: queries and keys; then of value_dim: dout and values. head: a query head.
  FLASHATTN_FUNC PlainRows<const T*> own_first(int head) const { return kOfKeys ? keys() : queries(head); }
  FLASHATTN_FUNC PlainRows<const T*> own_second(int head) const { return kOfKeys ? values() : douts(head); }
  FLASHATTN_FUNC PlainRows<const T*> columns_first(int head) const { return kOfKeys ? queries(head) : keys(); }
  FLASHATTN_FUNC PlainRows<const T*> columns_second(int head) const { return kOfKeys ? douts(head) : values(); }

  FLASHATTN_FUNC int row_count() const { return kOfKeys ? params().key_len : params().query_len; }
  // The columns that one of the rows first..last has a score with.
  FLASHATTN_FUNC KeySpan columns_of(int first, int last) const {
    return kOfKeys ? visibility.seen_from(first, last) : visibility.seen_by_any(first, last);
  }
  // Whether nothing is hidden between a warp's rows and these columns.
  FLASHATTN_FUNC bool all_see(int row, int column, int columns) const {
    int first = kOfKeys ? column : row, last = minimum(first + (kOfKeys ? columns : kWarpRows), params().query_len) - 1;
    return visibility.seen_by_all(first, last).contains(kOfKeys ? row : column, kOfKeys ? kWarpRows : columns);
  }
  FLASHATTN_FUNC SavedRow saved(int head, int query_index) const {
    return saved_row(head_of(row_stats, params(), params().row_stats, batch, head),
                     delta + delta_offset(params(), batch, head), params(), query_index);
  }

  FLASHATTN_FUNC T* first_row(T* dv, int row) const { return row_of(dv, params(), backward.dv, batch, kv_head, row); }
  FLASHATTN_FUNC T* second_row(T* array, int head, int row) const {
    return row_of(array, params(), kOfKeys ? backward.dk : backward.dq, batch, kOfKeys ? kv_head : head, row);
  }

  // One row, by a warp, whose lanes share the columns of its arrays.
  template <int D, int DV>
  FLASHATTN_FUNC void compute_again(int row, int head, int heads, T* dq, T* dk, T* dv, int lane) const {
    constexpr int kDepth = D / FLASHATTN_LANES, kWidth = DV / FLASHATTN_LANES;
    float own[kDepth], own_other[kWidth], first_sums[kWidth] = {}, second_sums[kDepth] = {};
    load(own, own_first(head), row, head_dim, lane);
    load(own_other, own_second(head), row, value_dim, lane);
    KeySpan columns = columns_of(row, row);
    for (int other = head; other < head + heads; ++other) {
      for (int column = columns.begin; column < columns.end; ++column) {
        float theirs[kDepth], theirs_other[kWidth];
        load(theirs, columns_first(other), column, head_dim, lane);
        load(theirs_other, columns_second(other), column, value_dim, lane);
        int query_index = kOfKeys ? column : row, key_index = kOfKeys ? row : column;
        ScoreGradient result =
            score_gradient(product_of(own, theirs), product_of(own_other, theirs_other), visibility,
                           visibility.row(query_index, other), saved(other, query_index), key_index, false);
        if (result.probability != 0) add(first_sums, result.probability, theirs_other);
        if (result.gradient != 0) add(second_sums, result.gradient, theirs);
      }
    }
    if (has_first(OF)) store(first_row(dv, row), first_sums, 1.0f, value_dim, lane);
    if (has_second(OF)) store(second_row(kOfKeys ? dk : dq, head, row), second_sums, params().scale, head_dim, lane);
  }

 private:
  template <int N>
  static FLASHATTN_FUNC void load(float (&to)[N], PlainRows<const T*> rows, int row, int columns, int lane) {
    FLASHATTN_UNROLL
    for (int i = 0; i < N; ++i) {
      int column = i * FLASHATTN_LANES + lane;
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
  static FLASHATTN_FUNC void add(float (&sums)[N], float by, const float (&row)[N]) {
    FLASHATTN_UNROLL
    for (int i = 0; i < N; ++i) sums[i] = multiply_add(by, row[i], sums[i]);
  }
  template <int N>
  static FLASHATTN_FUNC void store(T* to, const float (&sums)[N], float factor, int columns, int lane) {
    FLASHATTN_UNROLL
    for (int i = 0; i < N; ++i) {
      int column = i * FLASHATTN_LANES + lane;
      if (column < columns) to[column] = T(sums[i] * factor);
    }
  }
};

// The part of a tile in shared memory that a warp has.
template <typename T, int ROWS, int COLUMNS>
FLASHATTN_FUNC SharedTile<T, ROWS, COLUMNS> own_rows(SharedTile<T, ROWS, COLUMNS> tile, int first) {
  return {tile.memory + first * 128};
}

// Not 0 if one of the lane's numbers of a row is not finite.
template <int N>
FLASHATTN_FUNC float probe_of(const Fragment (&sums)[N], int h) {
  float probe = 0;
  FLASHATTN_UNROLL
  for (int c = 0; c < N; ++c) probe = multiply_add(sums[c][2 * h], 0, multiply_add(sums[c][2 * h + 1], 0, probe));
  return probe;
}

// Writes one of the lane's two rows.
template <typename T, int N>
FLASHATTN_FUNC void store_columns(T* row, const Fragment (&sums)[N], int h, float factor, int columns, int lane) {
  FLASHATTN_UNROLL
  for (int c = 0; c < N; ++c) {
    int column = output_column<T>(c, lane);
    if (column < columns) row[column] = T(sums[c][2 * h] * factor);
    if (column + kApart<T> < columns) row[column + kApart<T>] = T(sums[c][2 * h + 1] * factor);
  }
}

}  // namespace flashattn
