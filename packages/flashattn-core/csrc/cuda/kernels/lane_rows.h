// Computes the softmax of a warp's rows, then finishes and stores these rows. Several lanes share a row. The tensor
// cores' instruction decides which rows and keys a lane has: see warp_rows.h and integer_rows.h.
#pragma once

#include "single_row.h"
#include "visibility.h"

namespace flashattn {

// Whether a row's maximum is so large that the row must be recomputed without tensor cores, see LaneRows.
FLASHATTN_FUNC bool is_large(float row_max) {
  constexpr float kLarge = 1 << 21;
  return row_max <= -kLarge || row_max >= kLarge;
}

// If `needed`, the caller must multiply the output of the lane's row h by the factor by[h].
template <int ROWS>
struct Rescaling {
  bool needed;
  float by[ROWS];
};

// The ROWS rows of a lane. Each row is shared by LANES lanes: lane i, i + STEP, i + 2 STEP and so on. The derived
// class, Own, decides which products a lane holds, and supplies:
//   own_row(h, lane)    the index, within the warp's rows, of the lane's row h
//   for_each(scores, first_key, lane, function)    calls function(score, h, key) for the lane's scores of a tile
//   mask(scores, visibility, first_key, lane)    sets scores of hidden keys to -inf, and adds an additive mask
//   highest(scores, h)    the maximum of the lane's scores in row h
//   kScoreUnit    the factor that turns the tensor cores' result into the product of query and key
//   kBelowMax    by how many powers of two row_max stays below the maximum
//   probe(h, lane)    NaN if a number of the lane's output in row h is not finite, otherwise 0
//   write(row, h, factor, finite, lane)    writes the lane's output times factor if `finite`; all lanes call it
//   write_exactly(row, h, factor, lane)    writes it in float32, for calls with exact_out
//
// Until finish(), row_max is already multiplied by log2(e), so a score needs only one multiply-add before exp2. row_max
// is rounded, but the multiply-add does not round its product. This error changes all probabilities of a row by the
// same factor, and finish() removes this factor. If the maximum is large, so is its error, and float32 cannot hold the
// factor. The row is then recomputed.
// With an additive mask, many rows may have the lowest float as maximum, and should not be recomputed. So with such a
// mask, row_max is in natural units, and is subtracted from the score before the multiplication by log2(e).
template <typename Own, int ROWS, int LANES, int STEP>
struct LaneRows {
  // The output and the sum of a row are rescaled only when its maximum has grown by more than kSlack powers of two.
  // Until then, probabilities may be as large as 2^kSlack, which costs no accuracy.
  static constexpr float kSlack = 8;
  static constexpr float kUnit = has_bias ? M_LOG2E_F : 1;  // until finish(), row_max * kUnit is an exponent of two
  static constexpr int kOwn = ROWS;

  OnlineSoftmax softmax[ROWS];  // until finish(), row_sum is the sum over the keys of this lane
  Row rows[ROWS];
  float from_max[ROWS];  // after finish(): a factor by which the output must still be multiplied

  // Whether this lane is the first of its row's lanes. Only that lane writes the row's maximum and sum.
  static FLASHATTN_FUNC bool is_first(int lane) { return lane / STEP % LANES == 0; }

  // Starts the warp's rows of a key/value head. first_row: the number of the warp's first row, see RowPosition.
  FLASHATTN_FUNC void begin(Visibility visibility, int first_row, int kv_head, int group, int lane) {
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) {
      softmax[h] = empty_row();
      RowPosition position = row_position(first_row + Own::own_row(h, lane), kv_head, group);
      rows[h] = visibility.row(position.query, position.head);
    }
  }

  // Turns a tile's products of query and key into probabilities. first_key: the tile's first key. unmasked: masks
  // neither hide nor change any score of the tile. Returns the factors by which the output must be multiplied before
  // this tile's values are added to it.
  template <typename Scores>
  FLASHATTN_FUNC Rescaling<ROWS> to_probabilities(Scores& scores, Visibility visibility, int first_key, bool unmasked,
                                                  int lane) {
    float factor = product_unit(visibility) * M_LOG2E_F;
    if (!has_products(visibility)) {
      Own::for_each(scores, first_key, lane,
                    [&](float& x, int h, int key) { x = visibility.score(x * Own::kScoreUnit, rows[h], key); });
    }
    if (!unmasked) static_cast<Own&>(*this).mask(scores, visibility, first_key, lane);
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

  // Must be called after the last tile. Converts maxima and sums to natural units, which all other code expects. If a
  // row's maximum is large (see is_large()), sets from_max to NaN, so the row is recomputed.
  FLASHATTN_FUNC void finish(Visibility visibility) {
    float unit = product_unit(visibility), factor = unit * M_LOG2E_F;
    float rounded = multiply_add(unit, -M_LOG2E_F, factor) / unit;  // the rounding error of `factor`, divided by `unit`
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

  // Writes the rows whose numbers are all finite. Bit n of the result tells that row n of the warp is not finite.
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
      if constexpr (has_exact_out) {
        if (exists && finite) {
          own.write_exactly(outputs.exact_row(params, batch, head, query), h, result.normalise * from_max[h], lane);
        }
      }
      if (exists && finite && is_first(lane)) outputs.store_result(params, batch, head, query, result);
    }
    return __reduce_or_sync(~0u, not_finite);
  }

 private:
  // Whether the multiply-add before exp2 can apply all factors to the products of query and key. If not,
  // to_probabilities() first turns the products into scores in natural units.
  static FLASHATTN_FUNC bool has_products(Visibility visibility) {
    float unit = visibility.factor * Own::kScoreUnit;
    return visibility.has_plain_scores() && unit > 1e-30f && unit < 1e30f;
  }
  static FLASHATTN_FUNC float product_unit(Visibility visibility) {
    return has_products(visibility) ? visibility.factor * Own::kScoreUnit : 1;
  }
};

}  // namespace flashattn
