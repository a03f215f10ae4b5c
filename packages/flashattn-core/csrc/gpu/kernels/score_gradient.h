// The gradient of a score, from its row's maximum and sum: probabilities are computed again, and never stored.
//
//   P = exp(score - row_max) / row_sum   dP = dO V^T   delta = sum(dO * O) - dlse   dS = P (dP - delta)
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

// In front of exp2. difference: of the score and the row's maximum.
FLASHATTN_FUNC float exponent_of(float difference, SavedRow saved) {
  return multiply_add(difference, M_LOG2E_F, -saved.log2_sum);
}

// Of a hidden score it is 0 whatever the rest is: the sum may be NaN. Others are above the maximum by no more than
// rounding, and that of 1e38 is no small number.
FLASHATTN_FUNC float probability_of(float difference, SavedRow saved, bool hidden) {
  return hidden ? 0.0f : fast_exp2(at_most_zero(exponent_of(difference, saved)));
}

// derivative: of the score, by what Visibility::scaled() gave. dprobability: of dout and value. shown: the tile has
// nothing hidden.
FLASHATTN_FUNC float gradient_of(float probability, float dprobability, float derivative, SavedRow saved, bool shown) {
  float gradient = probability * (dprobability - saved.delta) * derivative;
  return shown || probability != 0 ? gradient : 0.0f;
}

// product: of query and key.
FLASHATTN_FUNC ScoreGradient score_gradient(float product, float dprobability, Visibility visibility, Row row,
                                            SavedRow saved, int key, bool shown) {
  float scaled = visibility.scaled(product), score = visibility.score_of_scaled(scaled, row, key);
  if (!shown) {
    score = visibility.masked(score, row, key);
  }
  float probability = probability_of(score - saved.row_max, saved, !shown && score == -INFINITY);
  return ScoreGradient{probability,
                       gradient_of(probability, dprobability, visibility.derivative(scaled), saved, shown)};
}

}  // namespace flashattn
