// The gradient of a score, from lse alone: probabilities are computed again, and never stored.
//
//   P = exp2(score - lse)   dP = dO V^T   delta = sum(dO * O) - dlse   dS = P (dP - delta)
//
// What is not visible, and a row that sees nothing, has P = 0 and dS = 0 whatever the rest is: NaN in a hidden key,
// value or query ends here, as far as these go. In the products of P and dS with such rows it does not: see finite.h.
#pragma once

#include "visibility.h"

#define FLASHATTN_BACKWARD_PARAMS const constant BackwardParams& backward [[buffer(25)]]

// What both kernels read besides query, key and value. delta: of (*B, H_q, L), one after the other.
#define FLASHATTN_BACKWARD_INPUTS(T)                                                 \
  const device float *saved_lse [[buffer(18)]], const device T *dout [[buffer(19)]], \
      const device float *delta [[buffer(21)]], FLASHATTN_PARAMS, FLASHATTN_BACKWARD_PARAMS

namespace flashattn {

// What of a row of scores its gradients need.
struct SavedRow {
  float lse;  // in units of log2(e)
  float delta;
};

// Where the deltas of a head's rows begin.
METAL_FUNC int64_t delta_offset(const constant AttentionParams& params, int batch, int head) {
  return (int64_t(batch) * params.num_heads + head) * params.query_len;
}

// Infinity for a row that sees nothing, and for one that does not exist: no score reaches it.
METAL_FUNC float lse_in_log2(float lse) {
  if (lse == -INFINITY) {
    return INFINITY;
  }
  float scaled = lse * M_LOG2E_F;
  return scaled < -FLT_MAX ? -FLT_MAX : scaled;  // below any score that is visible
}

METAL_FUNC SavedRow saved_row(const device float* lse, const device float* delta,
                              const constant AttentionParams& params, int query) {
  if (query >= params.query_len) {
    return SavedRow{INFINITY, 0.0f};
  }
  return SavedRow{lse_in_log2(lse[query * params.lse.row]), delta[query]};
}

struct ScoreGradient {
  float probability;
  float gradient;  // without the scale, by which dq and dk are multiplied at the end
};

// product: of query and key; dprobability: of dout and value. shown: the tile has nothing hidden.
METAL_FUNC ScoreGradient score_gradient(float product, float dprobability, Visibility visibility, Row row,
                                        SavedRow saved, int key, bool shown) {
  float scaled = visibility.scaled(product);
  float score = visibility.score_of_scaled(scaled, row, key);
  if (!shown) {
    score = visibility.masked(score, row, key);
  }
  // A score is above lse by no more than rounding, and that of 1e38 is no small number. No min(): NaN stays NaN.
  float exponent = score - saved.lse;
  float probability = metal::fast::exp2(exponent > 0 ? 0.0f : exponent);
  float gradient = probability * (dprobability - saved.delta);
  if (has_softcap) {
    gradient *= (1 - scaled) * (1 + scaled);  // tanh'
  }
  return ScoreGradient{probability, shown || probability != 0 ? gradient : 0.0f};
}

}  // namespace flashattn
