// Computes the gradient of a score. Probabilities are not stored, but recomputed from the row's maximum and sum.
//
//   P = exp(score - row_max) / row_sum   dP = dO V^T   delta = sum(dO * O) - dlse   dS = P (dP - delta)
//
// O is out in float32, see exact_out in gpu/launch.h; with precision="input" on CUDA it is the rounded out.
//
// Hidden scores, and rows that see no key, get P = 0 and dS = 0 even if a key, value or query holds NaN. Matrix
// products with P and dS must handle NaN in the other operand separately, see finite.h.
#pragma once

#include "visibility.h"

namespace flashattn {

// The numbers of a row from which the gradient is computed. Maximum and sum are separate, because adding log(sum) to a
// large maximum, as lse does, would lose digits of log(sum).
struct SavedRow {
  float row_max;
  float log2_sum;
  float delta;
};

// Returns where a head begins in the array delta.
FLASHATTN_FUNC int64_t delta_offset(FLASHATTN_UNIFORM AttentionParams& params, int batch, int head) {
  return (int64_t(batch) * params.num_heads + head) * params.query_len;
}

// Reads the SavedRow of a query. A row that sees no key, or that does not exist, gets an infinite sum, so that its
// probabilities are 0. row_stats, delta: pointers to the first row of the head.
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
  float gradient;  // without the factor `scale`, by which dq and dk are multiplied at the end
};

// The base-2 logarithm of a probability. difference: the score minus the row's maximum.
FLASHATTN_FUNC float exponent_of(float difference, SavedRow saved) {
  return multiply_add(difference, M_LOG2E_F, -saved.log2_sum);
}

// The probability is 0 for a hidden score, even if the row's sum is NaN. A recomputed score may exceed the row's
// maximum by a rounding error, which is huge for scores near 1e38. So the exponent is capped at 0.
FLASHATTN_FUNC float probability_of(float difference, SavedRow saved, bool hidden) {
  return hidden ? 0.0f : fast_exp2(at_most_zero(exponent_of(difference, saved)));
}

// Returns dS. dprobability: dP, the dot product of dout and value. derivative: the result of Visibility::derivative().
// unmasked: whether no score of the tile is hidden.
FLASHATTN_FUNC float gradient_of(float probability, float dprobability, float derivative, SavedRow saved,
                                 bool unmasked) {
  float gradient = probability * (dprobability - saved.delta) * derivative;
  return unmasked || probability != 0 ? gradient : 0.0f;
}

// Returns the probability and the gradient of one score. product: the dot product of query and key.
FLASHATTN_FUNC ScoreGradient score_gradient(float product, float dprobability, Visibility visibility, Row row,
                                            SavedRow saved, int key, bool unmasked) {
  float scaled = visibility.scaled(product), score = visibility.score_of_scaled(scaled, row, key);
  if (!unmasked) {
    score = visibility.masked(score, row, key);
  }
  float probability = probability_of(score - saved.row_max, saved, !unmasked && score == -INFINITY);
  return ScoreGradient{probability,
                       gradient_of(probability, dprobability, visibility.derivative(scaled), saved, unmasked)};
}

}  // namespace flashattn
