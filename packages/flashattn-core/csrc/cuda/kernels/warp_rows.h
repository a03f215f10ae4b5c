// 16 rows of a warp, from the first key to the last: their output, maxima and sums stay in its registers.
#pragma once

#include "decode_rows.h"
#include "epilogue.h"
#include "finite.h"
#include "tile_products.h"
#include "visibility.h"

namespace flashattn {

// Lanes n / 4 share two rows, which are `kRowStep` apart.
constexpr int kRowStep = 8;

// Of the four lanes that share a row.
FLASHATTN_FUNC float across_row_max(float x) {
  x = maximum(x, __shfl_xor_sync(~0u, x, 1));
  return maximum(x, __shfl_xor_sync(~0u, x, 2));
}
FLASHATTN_FUNC float across_row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Of four lanes with four words each: lane i gets word i of all four.
FLASHATTN_FUNC void transpose_words(uint (&words)[4], int lane) {
  FLASHATTN_UNROLL
  for (int step = 1; step < 4; step *= 2) {
    FLASHATTN_UNROLL
    for (int w = 0; w < 4; ++w) {
      if ((w & step) != 0) continue;
      bool second = (lane & step) != 0;
      uint got = __shfl_xor_sync(~0u, second ? words[w] : words[w + step], step);
      (second ? words[w] : words[w + step]) = got;
    }
  }
}

// Columns of a row, rounded up to whole lanes.
template <int COLUMNS>
constexpr int kLaneColumns = (COLUMNS + FLASHATTN_LANES - 1) / FLASHATTN_LANES * FLASHATTN_LANES;

// What a warp's rows are to be multiplied by.
struct Rescaling {
  bool needed;
  float by[2];
};

template <typename T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<half> = true;

template <typename T, int DV, int KEYS>
struct WarpRows {
  // Output and sum are rescaled only when a row's maximum has grown by so many powers of two. Until then probabilities
  // may be as large as 2^8, which costs no accuracy.
  static constexpr float kSlack = 8;
  // half has no numbers below 2^-24, where a row of many keys still has some weight. So its rows are seen from below
  // the maximum: probabilities are up to 2^15 then.
  static constexpr float kBelow = is_half<T> ? 7 : 0;

  Fragment output[DV / 8] = {};
  OnlineSoftmax softmax[2] = {empty_row(), empty_row()};  // the sums are those of the lane's own keys
  Row rows[2];

  // Rows first_row + n / 4 and 8 further, of those of `group` heads that share a key/value head: see row_position().
  FLASHATTN_FUNC void begin(Visibility visibility, int first_row, int kv_head, int group, int lane) {
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      RowPosition position = row_position(first_row + lane / 4 + h * kRowStep, kv_head, group);
      rows[h] = visibility.row(position.query, position.head);
    }
  }

  // Turns products of query and key into probabilities. first_key: of the tile. shown: all rows see all of its keys.
  // Returns what the output so far is to be multiplied by, before it takes these probabilities in.
  FLASHATTN_FUNC Rescaling to_probabilities(Fragment (&scores)[KEYS / 8], Visibility visibility, int first_key,
                                            bool shown, int lane) {
    // Where a score is the product times a positive factor, the factor waits for the multiply-add in front of exp2.
    float factor = visibility.factor;
    if (has_softcap || has_alibi_slopes || has_bias || !(factor > 0)) {
      factor = 1;
      for_each(scores, first_key, lane, [&](float x, int row, int key) { return visibility.score(x, rows[row], key); });
    }
    if (!shown) {
      for_each(scores, first_key, lane,
               [&](float x, int row, int key) { return visibility.masked(x, rows[row], key); });
    }
    float score_max[2];
    bool grown = false;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      score_max[h] = scores[0][2 * h];
      FLASHATTN_UNROLL
      for (int j = 0; j < KEYS / 8; ++j) {
        score_max[h] = maximum(score_max[h], maximum(scores[j][2 * h], scores[j][2 * h + 1]));
      }
      score_max[h] = across_row_max(score_max[h]) * factor;
      grown |= score_max[h] - kBelow > softmax[h].row_max + kSlack;
    }
    Rescaling rescaling = {__any_sync(~0u, grown) != 0, {1, 1}};
    if (rescaling.needed) {
      FLASHATTN_UNROLL
      for (int h = 0; h < 2; ++h) rescaling.by[h] = softmax[h].raise(score_max[h] - kBelow);
    }
    float reference[2] = {softmax[0].reference(), softmax[1].reference()};
    for_each(scores, first_key, lane, [&](float x, int row, int) {
      float probability = fast_exp2(multiply_add(x, factor, -reference[row]));
      softmax[row].row_sum += probability;
      return probability;
    });
    return rescaling;
  }

  FLASHATTN_FUNC void rescale(Rescaling rescaling) {
    if (rescaling.needed) {
      FLASHATTN_UNROLL
      for (int c = 0; c < DV / 8; ++c) {
        FLASHATTN_UNROLL
        for (int e = 0; e < 4; ++e) output[c][e] *= rescaling.by[e / 2];
      }
    }
  }

  // Writes the rows that exist and are finite. Returns the others, row r as bit r: see attend_again().
  FLASHATTN_FUNC uint store(RowOutputs<T> outputs, const AttentionParams& params, const uchar* sinks, int batch,
                            int lane) {
    uint not_finite = 0;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      softmax[h].row_sum = across_row_sum(softmax[h].row_sum);
      int query = rows[h].query, head = rows[h].head;
      RowResult result = finish_row(softmax[h], sinks, params, batch, head);
      bool exists = query < params.query_len;
      float probe = 0;  // becomes NaN with the first number that is not finite
      FLASHATTN_UNROLL
      for (int c = 0; c < DV / 8; ++c) {
        probe = multiply_add(output[c][2 * h], 0, multiply_add(output[c][2 * h + 1], 0, probe));
      }
      uint spoilt = __ballot_sync(~0u, exists && !(probe == 0));  // four bits for each row
      for (int row = 0; spoilt != 0; ++row, spoilt >>= 4)
        not_finite |= uint((spoilt & 15) != 0) << (row + h * kRowStep);
      bool stored = exists && !(not_finite >> (lane / 4 + h * kRowStep) & 1);
      T* row = outputs.out_row(params, batch, head, query);
      if constexpr (DV == value_dim && DV % 32 == 0 && sizeof(T) == 2) {
        FLASHATTN_UNROLL
        for (int c = 0; c < DV / 8; c += 4) {  // as 16 bytes of each lane, and not 4
          uint words[4];
          FLASHATTN_UNROLL
          for (int i = 0; i < 4; ++i) {
            const float* pair = &output[c + i][2 * h];
            words[i] = rounded_pair<T>(pair[0] * result.normalise, pair[1] * result.normalise);
          }
          transpose_words(words, lane);
          if (stored) store_four(row + (c + lane % 4) * 8, words);
        }
      } else if (stored) {
        FLASHATTN_UNROLL
        for (int c = 0; c < DV / 8; ++c) {
          int column = output_column<T>(c, lane);
          if (column < value_dim) row[column] = T(output[c][2 * h] * result.normalise);
          if (column + kNext<T> < value_dim) row[column + kNext<T>] = T(output[c][2 * h + 1] * result.normalise);
        }
      }
      if (stored && lane % 4 == 0) outputs.store_result(params, batch, head, query, result);
    }
    return not_finite;
  }

 private:
  // score = function(score, which of the two rows, its key)
  template <typename F>
  static FLASHATTN_FUNC void for_each(Fragment (&scores)[KEYS / 8], int first_key, int lane, F function) {
    FLASHATTN_UNROLL
    for (int j = 0; j < KEYS / 8; ++j) {
      FLASHATTN_UNROLL
      for (int e = 0; e < 4; ++e) {
        scores[j][e] = function(scores[j][e], e / 2, first_key + j * 8 + lane % 4 * 2 + e % 2);
      }
    }
  }
};

// Finishes the one row that a warp has.
template <typename Rows, typename T>
FLASHATTN_FUNC void store_row(Rows& row, RowOutputs<T> outputs, const AttentionParams& params, const uchar* sinks,
                              int batch, int lane) {
  int head = row.first.head, query = row.first.query;
  RowResult result = finish_row(row.softmax[0], sinks, params, batch, head);
  row.store(0, outputs.out_row(params, batch, head, query), result.normalise, lane);
  if (lane == 0) outputs.store_result(params, batch, head, query, result);
}

// A tensor core multiplies what a row does not see by 0, and 0 times NaN is NaN. So rows whose output is not finite are
// computed again without it, each by the whole warp. `rows`: those of a warp, row r as bit r. query: of row 0.
template <typename T>
FLASHATTN_FUNC void attend_again(uint rows, RowOutputs<T> outputs, const T* query_array, StoredInputs<T> stored,
                                 Visibility visibility, const uchar* sinks, int batch, int head, int query, int lane) {
  const AttentionParams& params = *visibility.params;
  int kv_head = head / (params.num_heads / params.num_kv_heads);
  for (; rows != 0; rows &= rows - 1) {
    RowPosition position = row_position(query + __ffs(rows) - 1, head, 1);
    KeySpan seen = visibility.seen(position.query);
    DecodeRows<T, kLaneColumns<head_dim>, kLaneColumns<value_dim>, 1> row;
    row.load(query_array, position, visibility, batch, lane);
    row.attend(keys_of(stored, params, batch, kv_head), values_of(stored, params, batch, kv_head), visibility,
               KeySpan{0, 0}, seen.begin, seen.end, row.kKeys, 0, lane);
    store_row(row, outputs, params, sinks, batch, lane);
  }
}

}  // namespace flashattn
