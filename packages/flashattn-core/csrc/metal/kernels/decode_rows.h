// A few rows against keys and values that are read where they lie, each once for all the rows. The lanes of a SIMD
// group share a row: each has some neighbouring columns, a score is the sum over the lanes. No threadgroup memory, no
// barriers.
#pragma once

#include "online_softmax.h"
#include "visibility.h"

namespace flashattn {

// ROWS rows of one SIMD group. D and DV: head_dim and value_dim rounded up to whole lanes.
template <typename T, int D, int DV, int ROWS>
struct DecodeRows {
  static constexpr constant int kColumns = D / FLASHATTN_LANES;  // of a lane
  static constexpr constant int kValueColumns = DV / FLASHATTN_LANES;
  // Keys taken at once, so that their loads are under way together; fewer where registers get scarce.
  static constexpr constant int kWidest = D > DV ? D : DV;
  static constexpr constant int kKeys = kWidest > 256 ? 1 : kWidest > 128 ? 2 : 4;

  float query[ROWS][kColumns];
  float output[ROWS][kValueColumns];
  OnlineSoftmax softmax[ROWS];
  Row row[ROWS];

  void clear() thread {
    FLASHATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      softmax[r] = empty_row();
      FLASHATTN_UNROLL
      for (int i = 0; i < kValueColumns; ++i) {
        output[r][i] = 0;
      }
    }
  }

  // Takes row r's query. A row that is padding sees nothing, and reads nothing.
  void load_query(int r, Row row_, const device T* tensor, const constant AttentionParams& params, int batch,
                  uint lane) thread {
    row[r] = row_;
    bool exists = row_.query < params.query_len;
    const device T* source = head_of(tensor, params, params.query, batch, row_.head);
    RowLayout layout = row_layout(params.query);
    FLASHATTN_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      int column = int(lane) * kColumns + i;
      bool inside = exists && (D == head_dim || column < head_dim);
      query[r][i] = inside ? float(source[layout.offset(row_.query, column)]) : 0.0f;
    }
  }

  // Takes keys first..first+count-1 in, at most kKeys, the first of which lies at key and value. `shown`: all rows see
  // all of them. The pointers are device or threadgroup ones.
  template <typename Pointer>
  void attend(Pointer key, RowLayout key_layout, Pointer value, RowLayout value_layout, Visibility visibility,
              int first, int count, bool shown, uint lane) thread {
    float scores[ROWS][kKeys];
    FLASHATTN_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      float columns[kColumns];
      FLASHATTN_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        int column = int(lane) * kColumns + i;
        bool inside = k < count && (D == head_dim || column < head_dim);
        columns[i] = inside ? float(key[key_layout.offset(k, column)]) : 0.0f;
      }
      FLASHATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        float product = 0;
        FLASHATTN_UNROLL
        for (int i = 0; i < kColumns; ++i) {
          product = metal::fma(query[r][i], columns[i], product);
        }
        scores[r][k] = visibility.score(metal::simd_sum(product), row[r], first + k);
      }
    }
    if (!shown) {
      FLASHATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        FLASHATTN_UNROLL
        for (int k = 0; k < kKeys; ++k) {
          scores[r][k] = k < count ? visibility.masked(scores[r][k], row[r], first + k) : -INFINITY;
        }
      }
    }
    FLASHATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      float score_max = scores[r][0];
      FLASHATTN_UNROLL
      for (int k = 1; k < kKeys; ++k) {
        score_max = metal::max(score_max, scores[r][k]);
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
    }
    FLASHATTN_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      FLASHATTN_UNROLL
      for (int i = 0; i < kValueColumns; ++i) {
        int column = int(lane) * kValueColumns + i;
        bool inside = k < count && (DV == value_dim || column < value_dim);
        float v = inside ? float(value[value_layout.offset(k, column)]) : 0.0f;
        FLASHATTN_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          // A value that the row does not see may be NaN or infinite.
          bool skipped = !shown && scores[r][k] == 0;
          output[r][i] = skipped ? output[r][i] : metal::fma(scores[r][k], v, output[r][i]);
        }
      }
    }
  }

  // Row r's output, times a factor.
  template <typename U>
  void store(int r, device U* target, float factor, uint lane) thread {
    FLASHATTN_UNROLL
    for (int i = 0; i < kValueColumns; ++i) {
      int column = int(lane) * kValueColumns + i;
      if (DV == value_dim || column < value_dim) {
        target[column] = U(output[r][i] * factor);
      }
    }
  }
};

}  // namespace flashattn
