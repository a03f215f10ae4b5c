// Rows of a warp as its lanes have them: the softmax of each, and its end. Which rows and keys a lane has, and where
// its output is, depends on how the tensor cores multiply: see warp_rows.h and integer_rows.h.
#pragma once

#include "single_row.h"
#include "visibility.h"

namespace flashattn {

// Rows with so large a maximum are computed again, without tensor cores. See LaneRows.
FLASHATTN_FUNC bool is_large(float row_max) {
  constexpr float kLarge = 1 << 21;
  return row_max <= -kLarge || row_max >= kLarge;
}

// What a lane's rows are to be multiplied by.
template <int ROWS>
struct Rescaling {
  bool needed;
  float by[ROWS];
};

// ROWS rows, which LANES lanes share that are STEP apart. Of Own are, by the layout of its products:
//   own_row(h, lane)    which of the warp's rows is a lane's row h
//   for_each(scores, first_key, lane, function)    function(score, h, key) for those that the lane has of a tile's
//   mask(scores, visibility, first_key, lane)    scores become -inf where the rows do not see the keys
//   highest(scores, h)    their maximum in row h
//   kScoreUnit    the unit of products; kBelowMax: how far below its maximum a row is seen from, in powers of two
//   probe(h, lane)    0 times all numbers of the output that the lane has
//   write(row, h, factor, finite, lane)    by the warp, of these numbers times a factor, where the row is finite
//
// Until finish(), row_max is in units of log2, so that one multiply-add stands in front of exp2. row_max is a rounded
// product, and the multiply-add rounds none: so all probabilities of a row are too large or too small by one factor.
// finish() takes the factor out. A large maximum is rounded by so much that the factor is none of float32's numbers:
// such a row is computed again. With an additive mask row_max is a natural score, and subtracted before it is
// multiplied: many rows may see nothing but the lowest float.
template <typename Own, int ROWS, int LANES, int STEP>
struct LaneRows {
  // Output and sum are rescaled only when a row's maximum has grown by so many powers of two. Until then probabilities
  // may be as large as 2^8, which costs no accuracy.
  static constexpr float kSlack = 8;
  static constexpr float kUnit = has_bias ? M_LOG2E_F : 1;  // of a maximum until finish(), in powers of two
  static constexpr int kOwn = ROWS;

  OnlineSoftmax softmax[ROWS];  // until finish(), the sums are those of the lane's own keys
  Row rows[ROWS];
  float from_max[ROWS];  // after finish(): what the output is still to be multiplied by

  // Of the lanes that share rows, the one that writes what they have in common.
  static FLASHATTN_FUNC bool is_first(int lane) { return lane / STEP % LANES == 0; }

  // The warp's rows are first_row and on, of `group` heads that share a key/value head: see row_position().
  FLASHATTN_FUNC void begin(Visibility visibility, int first_row, int kv_head, int group, int lane) {
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) {
      softmax[h] = empty_row();
      RowPosition position = row_position(first_row + Own::own_row(h, lane), kv_head, group);
      rows[h] = visibility.row(position.query, position.head);
    }
  }

  // Turns products of query and key into probabilities. first_key: of the tile. shown: all rows see all of its keys.
  // Returns what the output so far is to be multiplied by, before it takes these probabilities in.
  template <typename Scores>
  FLASHATTN_FUNC Rescaling<ROWS> to_probabilities(Scores& scores, Visibility visibility, int first_key, bool shown,
                                                  int lane) {
    float factor = product_unit(visibility) * M_LOG2E_F;
    if (!has_products(visibility)) {
      Own::for_each(scores, first_key, lane,
                    [&](float& x, int h, int key) { x = visibility.score(x * Own::kScoreUnit, rows[h], key); });
    }
    if (!shown) static_cast<Own&>(*this).mask(scores, visibility, first_key, lane);
    float score_max[ROWS];
    bool grown = false;
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) {
      score_max[h] = Own::highest(scores, h) * (has_bias ? 1 : factor);
      grown |= score_max[h] - Own::kBelowMax / kUnit > softmax[h].row_max + kSlack / kUnit;
    }
    Rescaling<ROWS> rescaling = {__any_sync(~0u, grown) != 0, {}};
    if (rescaling.needed) {
      FLASHATTN_UNROLL
      for (int h = 0; h < ROWS; ++h) {
        rescaling.by[h] = softmax[h].raise(lane_max<LANES, STEP>(score_max[h]) - Own::kBelowMax / kUnit, kUnit);
      }
    }
    float reference[ROWS];
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) reference[h] = softmax[h].reference();
    Own::for_each(scores, first_key, lane, [&](float& x, int h, int) {
      x = fast_exp2(has_bias ? (x - reference[h]) * factor : multiply_add(x, factor, -reference[h]));
      softmax[h].row_sum += x;
    });
    return rescaling;
  }

  // After the last tile: maxima and sums become those of natural scores, as all kernels leave them, and NaN where
  // scores are so large that the row has to be computed again.
  FLASHATTN_FUNC void finish(Visibility visibility) {
    float unit = product_unit(visibility), factor = unit * M_LOG2E_F;
    float rounded = multiply_add(unit, -M_LOG2E_F, factor) / unit;  // by so much factor / unit is more than log2(e)
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) {
      float sum = lane_sum<LANES, STEP>(softmax[h].row_sum), reference = softmax[h].reference();
      float row_max = has_bias ? reference + Own::kBelowMax / kUnit : (reference + Own::kBelowMax) * M_LN2_F;
      float above = has_bias ? (row_max - reference) * M_LOG2E_F
                             : multiply_add(row_max, rounded, multiply_add(row_max, M_LOG2E_F, -reference));
      bool lost = !has_bias && is_large(row_max);
      from_max[h] = lost ? 0 * INFINITY : fast_exp2(-above);
      softmax[h] = OnlineSoftmax{softmax[h].row_max == -INFINITY ? -INFINITY : row_max, sum * from_max[h]};
    }
  }

  // Writes the rows that are finite, once they are finished. Returns the others: bit n is row n of the warp's.
  template <typename T>
  FLASHATTN_FUNC uint store(RowOutputs<T> outputs, const AttentionParams& params, const uchar* sinks, int batch,
                            int lane) const {
    const Own& own = static_cast<const Own&>(*this);
    uint not_finite = 0;
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) {
      int query = rows[h].query, head = rows[h].head;
      RowResult result = finish_row(softmax[h], sinks, params, batch, head);
      float probe = own.probe(h, lane) + 0 * softmax[h].row_sum;
      bool exists = query < params.query_len, finite = lane_sum<LANES, STEP>(probe) == 0;
      not_finite |= uint(exists && !finite) << Own::own_row(h, lane);
      own.write(outputs.out_row(params, batch, head, query), h, result.normalise * from_max[h], exists && finite, lane);
      if (exists && finite && is_first(lane)) outputs.store_result(params, batch, head, query, result);
    }
    return __reduce_or_sync(~0u, not_finite);
  }

 private:
  // Whether scores are products times a factor that can wait for the multiply-add in front of exp2. Natural ones else.
  static FLASHATTN_FUNC bool has_products(Visibility visibility) {
    float unit = visibility.factor * Own::kScoreUnit;
    return visibility.has_plain_scores() && unit > 1e-30f && unit < 1e30f;
  }
  static FLASHATTN_FUNC float product_unit(Visibility visibility) {
    return has_products(visibility) ? visibility.factor * Own::kScoreUnit : 1;
  }
};

}  // namespace flashattn
