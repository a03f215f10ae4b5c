// 16 rows of a warp, from the first key to the last: their output, maxima and sums stay in its registers.
#pragma once

#include "finite.h"
#include "single_row.h"
#include "tile_products.h"
#include "visibility.h"

namespace flashattn {

// Four lanes share two rows, which are `kRowStep` apart.
constexpr int kRowLanes = 4, kRowStep = 8;

// What a warp's rows are to be multiplied by.
struct Rescaling {
  bool needed;
  float by[2];
};

// half has no numbers below 2^-24, where a row of many keys still has some weight. So its rows are seen from below the
// maximum: probabilities are up to 2^15 then.
template <typename T>
constexpr float kBelow = 0;
template <>
constexpr float kBelow<half> = 7;

// E: what the tensor cores multiply, by which lanes have their columns; T: what is written.
template <typename T, int DV, int KEYS, typename E = T>
struct WarpRows {
  // Output and sum are rescaled only when a row's maximum has grown by so many powers of two. Until then probabilities
  // may be as large as 2^8, which costs no accuracy.
  static constexpr float kSlack = 8;
  static constexpr int kOwn = 2;  // rows of a lane

  Fragment output[DV / 8] = {};
  OnlineSoftmax softmax[2] = {empty_row(), empty_row()};  // the sums are those of the lane's own keys
  Row rows[2];

  static FLASHATTN_FUNC int own_row(int h, int lane) { return lane / kRowLanes + h * kRowStep; }
  // Of the lanes that share rows, the one that writes what they have in common.
  static FLASHATTN_FUNC bool is_first(int lane) { return lane % kRowLanes == 0; }

  // The lane's of rows first_row to first_row + 15, of `group` heads that share a key/value head: see row_position().
  FLASHATTN_FUNC void begin(Visibility visibility, int first_row, int kv_head, int group, int lane) {
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      RowPosition position = row_position(first_row + own_row(h, lane), kv_head, group);
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
      score_max[h] = lane_max<kRowLanes>(score_max[h]) * factor;
      grown |= score_max[h] - kBelow<T> > softmax[h].row_max + kSlack;
    }
    Rescaling rescaling = {__any_sync(~0u, grown) != 0, {1, 1}};
    if (rescaling.needed) {
      FLASHATTN_UNROLL
      for (int h = 0; h < 2; ++h) rescaling.by[h] = softmax[h].raise(score_max[h] - kBelow<T>);
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
      for (int i = 0; i < DV / 2; ++i) output[i / 4][i % 4] *= rescaling.by[i % 4 / 2];
    }
  }

  FLASHATTN_FUNC void add(const Fragment (&sums)[DV / 8]) {
    FLASHATTN_UNROLL
    for (int i = 0; i < DV / 2; ++i) output[i / 4][i % 4] += sums[i / 4][i % 4];
  }

  // After the last tile.
  FLASHATTN_FUNC void finish() {
    FLASHATTN_UNROLL
    for (int h = 0; h < kOwn; ++h) softmax[h].row_sum = lane_sum<kRowLanes>(softmax[h].row_sum);
  }

  // Writes the rows that are finite, once they are finished. Returns the others: bit n is lane n's first row if n % 4
  // is 0, its second if 1.
  FLASHATTN_FUNC uint store(RowOutputs<T> outputs, const AttentionParams& params, const uchar* sinks, int batch,
                            int lane) {
    uint not_finite = 0;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      int query = rows[h].query, head = rows[h].head;
      RowResult result = finish_row(softmax[h], sinks, params, batch, head);
      bool exists = query < params.query_len;
      float probe = 0;  // becomes NaN with the first number that is not finite
      FLASHATTN_UNROLL
      for (int c = 0; c < DV / 8; ++c) {
        probe = multiply_add(output[c][2 * h], 0, multiply_add(output[c][2 * h + 1], 0, probe));
      }
      bool finite = lane_sum<kRowLanes>(probe) == 0, stored = exists && finite;
      not_finite |= (__ballot_sync(~0u, exists && !finite) & 0x11111111) << h;
      T* row = outputs.out_row(params, batch, head, query);
      FLASHATTN_UNROLL
      for (int i = 0; i < DV / 4; ++i) output[i / 2][2 * h + i % 2] *= result.normalise;
      if constexpr (DV == value_dim && sizeof(T) == 2) {  // two lanes exchange pairs: each writes four neighbours
        bool odd = lane % 2 != 0;
        FLASHATTN_UNROLL
        for (int c = 0; c < DV / 8; c += 2) {
          uint pair = rounded_pair<T>(output[c][2 * h], output[c][2 * h + 1]);
          uint next = rounded_pair<T>(output[c + 1][2 * h], output[c + 1][2 * h + 1]);
          uint got = __shfl_xor_sync(~0u, odd ? pair : next, 1);
          uint2 four = {odd ? got : pair, odd ? next : got};
          if (stored) *reinterpret_cast<uint2*>(row + (c + odd) * 8 + lane % 4 / 2 * 4) = four;
        }
      } else if (stored) {
        FLASHATTN_UNROLL
        for (int c = 0; c < DV / 8; ++c) {
          int column = output_column<E>(c, lane);
          if (column < value_dim) row[column] = T(output[c][2 * h]);
          if (column + kNext<E> < value_dim) row[column + kNext<E>] = T(output[c][2 * h + 1]);
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
    for (int i = 0; i < KEYS / 2; ++i) {
      float& score = scores[i / 4][i % 4];
      score = function(score, i % 4 / 2, first_key + i / 4 * 8 + lane % 4 * 2 + i % 2);
    }
  }
};

// With the queries, of which a warp has 16 of ROWS. K: of what keys and values are.
template <typename T, typename K, int ROWS, int D, int DV, int KEYS>
struct AttendingRows : WarpRows<T, DV, KEYS> {
  // Apart from each other in memory that lanes write together, of 8 rows of two columns or of two rows of four: so they
  // are in different banks.
  static constexpr int kPitch = DV + (sizeof(T) == 2 ? 8 : 4);

  SharedTile<T, ROWS, D> queries;

  template <int PARTS>
  FLASHATTN_FUNC void attend(SharedTile<T, KEYS, D> keys, SharedTile<T, KEYS, DV> values, Visibility visibility,
                             int first_key, bool shown, int lane) {
    Fragment scores[KEYS / 8] = {};
    multiply_keys(scores, queries, keys, lane);
    this->rescale(this->to_probabilities(scores, visibility, first_key, shown, lane));
    add_values<PARTS>(this->output, scores, values, lane);
  }

  // Leaves one of the lane's rows in shared memory.
  FLASHATTN_FUNC void leave_row(float* row, int h, int lane) const {
    constexpr int kStep = sizeof(T) == 2 ? 1 : 4;  // see output_column()
    FLASHATTN_UNROLL
    for (int c = 0; c < DV / 8; c += kStep) {
      const Fragment* from = this->output + c;
      if constexpr (kStep == 1) {
        *reinterpret_cast<float2*>(row + output_column<T>(c, lane)) = {from[0][2 * h], from[0][2 * h + 1]};
      } else {
        FLASHATTN_UNROLL
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          *reinterpret_cast<float4*>(row + output_column<T>(c, lane) + e % 2 * kNext<T>) = {from[0][e], from[1][e],
                                                                                            from[2][e], from[3][e]};
        }
      }
    }
  }
};

FLASHATTN_FUNC constexpr int whole_lanes(int columns) {
  return (columns + FLASHATTN_LANES - 1) / FLASHATTN_LANES * FLASHATTN_LANES;
}

// A tensor core multiplies what a row does not see by 0, and 0 times NaN is NaN. So rows whose output is not finite are
// computed again without it. `rows`: those of a warp, as WarpRows::store() returns them. first: the query of row 0.
template <typename T, typename K>
FLASHATTN_FUNC void attend_again(uint rows, RowOutputs<T> outputs, const T* query, StoredInputs<K> stored,
                                 Visibility visibility, const uchar* sinks, int batch, int head, int first, int lane) {
  const AttentionParams& params = *visibility.params;
  for (; rows != 0; rows &= rows - 1) {
    int bit = __ffs(rows) - 1;
    RowPosition position = row_position(first + bit / kRowLanes + bit % kRowLanes * kRowStep, head, 1);
    auto row = attended_row<whole_lanes(head_dim), whole_lanes(value_dim)>(
        query, stored, visibility, batch, head / (params.num_heads / params.num_kv_heads), position,
        visibility.seen(position.query), visibility.seen_by_all(position.query, position.query), lane);
    store_row(row, outputs, params, sinks, batch, lane);
  }
}

}  // namespace flashattn
