// A SIMD group computes a few rows without threadgroup memory. It reads each key and value once for all rows. The lanes
// share each row: a lane holds some neighbouring columns, and a score is a sum over the lanes.
#pragma once

#include "online_softmax.h"
#include "stored_rows.h"
#include "visibility.h"

namespace flashattn {

// A row of a key/value head: one query of one query head. Rows are numbered by query, then by head. So the rows of
// query 0 in all query heads come first.
struct RowPosition {
  int query;
  int head;
  int first_head;  // the first query head of the key/value head
  int group;       // how many query heads share a key/value head

  FLASHATTN_FUNC void next() FLASHATTN_THREAD {
    ++head;
    if (head == first_head + group) {
      head = first_head;
      ++query;
    }
  }
};

FLASHATTN_FUNC RowPosition row_position(int row, int kv_head, int group) {
  return RowPosition{row / group, kv_head * group + row % group, kv_head * group, group};
}

// Stores a lane's neighbouring columns of a row, times `factor`.
template <int COLUMNS, typename T>
FLASHATTN_FUNC void store_lane_columns(FLASHATTN_DEVICE T* row, FLASHATTN_THREAD const float (&columns)[COLUMNS],
                                       float factor, uint lane) {
  FLASHATTN_UNROLL
  for (int i = 0; i < COLUMNS; ++i) {
    int column = int(lane) * COLUMNS + i;
    if (COLUMNS * FLASHATTN_LANES == value_dim || column < value_dim) {
      row[column] = T(columns[i] * factor);
    }
  }
}

// ROWS rows that one SIMD group computes. D and DV: head_dim and value_dim, rounded up to a multiple of
// FLASHATTN_LANES.
template <typename T, int D, int DV, int ROWS>
struct DecodeRows {
  static constexpr FLASHATTN_UNIFORM int kRows = ROWS;
  static constexpr FLASHATTN_UNIFORM int kColumns = D / FLASHATTN_LANES;  // per lane
  static constexpr FLASHATTN_UNIFORM int kValueColumns = DV / FLASHATTN_LANES;
  static constexpr FLASHATTN_UNIFORM int kWidest = D > DV ? D : DV;
  // kKeys: how many keys a lane loads together. The rows need kOwn registers, and a key's scores need one register per
  // row. The total should not exceed 88, because a thread has only 128 registers on the smallest GPUs.
  static constexpr FLASHATTN_UNIFORM int kOwn = ROWS * (kColumns + kValueColumns + 2);
  static constexpr FLASHATTN_UNIFORM int kMost = kWidest > 256 ? 1 : kWidest > 128 ? 2 : 4;
  static constexpr FLASHATTN_UNIFORM int kKeys = kOwn + ROWS * kMost <= 88            ? kMost
                                                 : kOwn + ROWS * 2 <= 88 && kMost > 1 ? 2
                                                                                      : 1;
  static_assert(2 * kKeys * kWidest / 32 <= FLASHATTN_LANES, "a lane for each scale and bias, see QuantisedBatch");

  float query[ROWS][kColumns];
  float output[ROWS][kValueColumns];
  OnlineSoftmax softmax[ROWS];
  float slope[ROWS];  // ALiBi's
  RowPosition first;  // of the first row; the other rows' positions are computed, which saves registers

  // Loads the rows' queries, from first_position on. A row beyond the last query is padding, and sees no key.
  FLASHATTN_FUNC void load(const FLASHATTN_DEVICE T* tensor, RowPosition first_position, Visibility visibility,
                           int batch, uint lane) FLASHATTN_THREAD {
    FLASHATTN_UNIFORM AttentionParams& params = *visibility.params;
    RowLayout layout = row_layout(params.query);
    first = first_position;
    RowPosition position = first;
    FLASHATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      softmax[r] = empty_row();
      FLASHATTN_UNROLL
      for (int i = 0; i < kValueColumns; ++i) {
        output[r][i] = 0;
      }
      bool exists = position.query < params.query_len;
      slope[r] = visibility.row(position.query, position.head).slope;
      const FLASHATTN_DEVICE T* source = head_of(tensor, params, params.query, batch, position.head);
      FLASHATTN_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        int column = int(lane) * kColumns + i;
        bool inside = exists && (D == head_dim || column < head_dim);
        query[r][i] = inside ? float(source[layout.offset(position.query, column)]) : 0.0f;
      }
      position.next();
    }
  }

  // Attends to the first kKeys of every `step` keys in begin..end-1. `keys` and `values` begin with key number
  // `origin`. all: the keys that need no mask for any row.
  template <typename Source>
  FLASHATTN_FUNC void attend(Source keys, Source values, Visibility visibility, KeySpan all, int begin, int end,
                             int step, int origin, uint lane) FLASHATTN_THREAD {
    int k = begin;
    for (; k + kKeys <= end; k += step) {
      attend_batch<true>(keys.from(k - origin), values.from(k - origin), visibility, k, kKeys, all.contains(k, kKeys),
                         lane);
    }
    if (k < end) {
      attend_batch<false>(keys.from(k - origin), values.from(k - origin), visibility, k, end - k, false, lane);
    }
  }

 private:
  // WHOLE: whether count is kKeys. If so, a lane's loads are unconditional and wide.
  template <bool WHOLE, typename Source>
  FLASHATTN_FUNC void attend_batch(Source keys, Source values, Visibility visibility, int first_key, int count,
                                   bool unmasked, uint lane) FLASHATTN_THREAD {
    float scores[ROWS][kKeys];
    auto key_batch = keys.batch(count, head_dim, lane);
    FLASHATTN_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      float columns[kColumns];
      key_batch.template load<D, kColumns>(columns, k, int(lane) * kColumns, head_dim, WHOLE || k < count);
      FLASHATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        float product = 0;
        FLASHATTN_UNROLL
        for (int i = 0; i < kColumns; ++i) {
          product = multiply_add(query[r][i], columns[i], product);
        }
        scores[r][k] = FLASHATTN_LANE_SUM(product);
      }
    }
    RowPosition position = first;
    FLASHATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      Row row = visibility.row_with_slope(position.query, position.head, slope[r]);
      float score_max = -INFINITY;
      FLASHATTN_UNROLL
      for (int k = 0; k < kKeys; ++k) {
        scores[r][k] = visibility.score(scores[r][k], row, first_key + k);
        if (!unmasked) {
          bool exists = WHOLE || k < count;
          scores[r][k] = exists ? visibility.masked(scores[r][k], row, first_key + k) : -INFINITY;
        }
        score_max = maximum(score_max, scores[r][k]);
      }
      float rescale = softmax[r].raise(score_max);
      FLASHATTN_UNROLL
      for (int k = 0; k < kKeys; ++k) {
        scores[r][k] = softmax[r].probability(scores[r][k]);
        softmax[r].row_sum += scores[r][k];
      }
      FLASHATTN_UNROLL
      for (int i = 0; i < kValueColumns; ++i) {
        output[r][i] *= rescale;
      }
      position.next();
    }
    auto value_batch = values.batch(count, value_dim, lane);
    FLASHATTN_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      float columns[kValueColumns];
      value_batch.template load<DV, kValueColumns>(columns, k, int(lane) * kValueColumns, value_dim,
                                                   WHOLE || k < count);
      FLASHATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        if (unmasked || scores[r][k] != 0) {  // the value of a hidden key may be NaN or infinite
          FLASHATTN_UNROLL
          for (int i = 0; i < kValueColumns; ++i) {
            output[r][i] = multiply_add(scores[r][k], columns[i], output[r][i]);
          }
        }
      }
    }
  }
};

}  // namespace flashattn
