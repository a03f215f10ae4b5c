// The gradient of a score, from its row's maximum and sum: probabilities are computed again, and never stored.
//
//   P = exp2(score - row_max) / row_sum   dP = dO V^T   delta = sum(dO * O) - dlse   dS = P (dP - delta)
//
// What is not visible, and a row that sees nothing, has P = 0 and dS = 0 whatever the rest is: NaN in a hidden key,
// value or query ends here, as far as these go. In the products of P and dS with such rows it does not: see finite.h.
#pragma once

#include "visibility.h"

namespace flashattn {

// What of a row of scores its gradients need. Not lse, which rounds the logarithm of the sum away beside a large
// maximum.
struct SavedRow {
  float row_max;
  float log2_sum;
  float delta;
};

// Where the deltas of a head's rows begin.
FLASHATTN_FUNC int64_t delta_offset(FLASHATTN_UNIFORM AttentionParams& params, int batch, int head) {
  return (int64_t(batch) * params.num_heads + head) * params.query_len;
}

// delta of one row, by a SIMD group: its lanes share the columns.
template <typename T>
FLASHATTN_FUNC float delta_of(const FLASHATTN_DEVICE T* out, const FLASHATTN_DEVICE T* dout,
                              const FLASHATTN_DEVICE float* dlse, FLASHATTN_UNIFORM AttentionParams& params,
                              FLASHATTN_UNIFORM BackwardParams& backward, int batch, int head, int query, uint lane) {
  const FLASHATTN_DEVICE T* out_row = head_of(out, params, params.out, batch, head) + query * params.out.row;
  const FLASHATTN_DEVICE T* dout_row = head_of(dout, params, backward.dout, batch, head) + query * backward.dout.row;
  float sum = 0;
  for (int column = int(lane); column < value_dim; column += FLASHATTN_LANES) {
    sum = multiply_add(float(dout_row[column * backward.dout.column]), float(out_row[column * params.out.column]), sum);
  }
  sum = FLASHATTN_LANE_SUM(sum);
  if (has_dlse) {
    sum -= head_of(dlse, params, backward.dlse, batch, head)[query * backward.dlse.row];
  }
  return sum;
}

// A sum of infinity for a row that sees nothing, and for one that does not exist: all its probabilities are 0.
// `row_stats` and `delta`: of the head.
FLASHATTN_FUNC SavedRow saved_row(const FLASHATTN_DEVICE float* row_stats, const FLASHATTN_DEVICE float* delta,
                                  FLASHATTN_UNIFORM AttentionParams& params, int query) {
  if (query >= params.query_len) {
    return SavedRow{0.0f, INFINITY, 0.0f};
  }
  const FLASHATTN_DEVICE float* stats = row_stats + query * params.row_stats.row;
  float row_sum = stats[params.row_stats.column];
  if (row_sum == 0) {
    return SavedRow{0.0f, INFINITY, delta[query]};
  }
  return SavedRow{stats[0], precise_log2(row_sum), delta[query]};
}

struct ScoreGradient {
  float probability;
  float gradient;  // without the scale, by which dq and dk are multiplied at the end
};

// product: of query and key; dprobability: of dout and value. shown: the tile has nothing hidden.
FLASHATTN_FUNC ScoreGradient score_gradient(float product, float dprobability, Visibility visibility, Row row,
                                            SavedRow saved, int key, bool shown) {
  float scaled = visibility.scaled(product);
  float score = visibility.score_of_scaled(scaled, row, key);
  if (!shown) {
    score = visibility.masked(score, row, key);
  }
  // Nothing is subtracted from what is hidden: the sum may be NaN. Otherwise a score is above the maximum by no more
  // than rounding, and that of 1e38 is no small number. No min(), which would turn NaN into one.
  float exponent = score == -INFINITY ? -INFINITY : score - saved.row_max - saved.log2_sum;
  float probability = fast_exp2(exponent > 0 ? 0.0f : exponent);
  float gradient = probability * (dprobability - saved.delta) * visibility.derivative(scaled);
  return ScoreGradient{probability, shown || probability != 0 ? gradient : 0.0f};
}

}  // namespace flashattn
