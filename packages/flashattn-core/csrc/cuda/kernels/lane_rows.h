// Rows of a warp as its lanes have them: the softmax of each, and its end. Which rows and keys a lane has, and where
// its output is, depends on how the tensor cores multiply: see warp_rows.h and integer_rows.h.
#pragma once

#include "single_row.h"
#include "visibility.h"

namespace flashattn {

// What a lane's rows are to be multiplied by.
template <int ROWS>
struct Rescaling {
  bool needed;
  float by[ROWS];
};

// ROWS rows, which LANES lanes share that are STEP apart. Of Own are, by the layout of its products:
//   own_row(h, lane)    which of the warp's rows is a lane's row h
//   for_each(scores, first_key, lane, function)    function(score, h, key) for those that the lane has of a tile's
//   highest(scores, h)    their maximum in row h
//   kScoreUnit    the unit of products; kBelowMax: how far below its maximum a row is seen from
//   probe(h, lane)    0 times all numbers of the output that the lane has
//   write(row, h, factor, finite, lane)    by the warp, of these numbers times a factor, where the row is finite
template <typename Own, int ROWS, int LANES, int STEP>
struct LaneRows {
  // Output and sum are rescaled only when a row's maximum has grown by so many powers of two. Until then probabilities
  // may be as large as 2^8, which costs no accuracy.
  static constexpr float kSlack = 8;
  static constexpr int kOwn = ROWS;

  OnlineSoftmax softmax[ROWS];  // until finish(), the sums are those of the lane's own keys
  Row rows[ROWS];

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
    // Where a score is the product times a positive factor, the factor waits for the multiply-add in front of exp2.
    float factor = visibility.factor * Own::kScoreUnit;
    if (has_softcap || has_alibi_slopes || has_bias || !(factor > 0)) {
      factor = 1;
      Own::for_each(scores, first_key, lane,
                    [&](float& x, int h, int key) { x = visibility.score(x * Own::kScoreUnit, rows[h], key); });
    }
    if (!shown) {
      Own::for_each(scores, first_key, lane, [&](float& x, int h, int key) { x = visibility.masked(x, rows[h], key); });
    }
    float score_max[ROWS];
    bool grown = false;
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) {
      score_max[h] = Own::highest(scores, h) * factor;
      grown |= score_max[h] - Own::kBelowMax > softmax[h].row_max + kSlack;
    }
    Rescaling<ROWS> rescaling = {__any_sync(~0u, grown) != 0, {}};
    if (rescaling.needed) {
      FLASHATTN_UNROLL
      for (int h = 0; h < ROWS; ++h) {
        rescaling.by[h] = softmax[h].raise(lane_max<LANES, STEP>(score_max[h]) - Own::kBelowMax);
      }
    }
    float reference[ROWS];
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) reference[h] = softmax[h].reference();
    Own::for_each(scores, first_key, lane, [&](float& x, int h, int) {
      x = fast_exp2(multiply_add(x, factor, -reference[h]));
      softmax[h].row_sum += x;
    });
    return rescaling;
  }

  // After the last tile.
  FLASHATTN_FUNC void finish() {
    FLASHATTN_UNROLL
    for (int h = 0; h < ROWS; ++h) softmax[h].row_sum = lane_sum<LANES, STEP>(softmax[h].row_sum);
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
      bool exists = query < params.query_len, finite = lane_sum<LANES, STEP>(own.probe(h, lane)) == 0;
      not_finite |= uint(exists && !finite) << Own::own_row(h, lane);
      own.write(outputs.out_row(params, batch, head, query), h, result.normalise, exists && finite, lane);
      if (exists && finite && is_first(lane)) outputs.store_result(params, batch, head, query, result);
    }
    return __reduce_or_sync(~0u, not_finite);
  }
};

}  // namespace flashattn
