// The gradient of a score, from lse alone: probabilities are computed again, and never stored.
//
//   P = exp2(score - lse)   dP = dO V^T   delta = sum(dO * O) - dlse   dS = P (dP - delta)
//
// What is not visible, and a row that sees nothing, has P = 0 and dS = 0 whatever the rest is: NaN in a hidden key,
// value or query ends here, as far as these go. In the products of P and dS with such rows it does not: see finite.h.
#pragma once

#include "visibility.h"

namespace flashattn {

// What of a row of scores its gradients need. lse + rest is the saved lse in units of log2(e), with the digits that a
// float has not: of an lse of 1000 rounding would leave an error of 1e-4 in every probability.
struct SavedRow {
  float lse;
  float rest;
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

// An lse of infinity for a row that sees nothing, and for one that does not exist: no score reaches it.
FLASHATTN_FUNC SavedRow saved_row(const FLASHATTN_DEVICE float* lse, const FLASHATTN_DEVICE float* delta,
                                  FLASHATTN_UNIFORM AttentionParams& params, int query) {
  if (query >= params.query_len) {
    return SavedRow{INFINITY, 0.0f, 0.0f};
  }
  float natural = lse[query * params.lse.row];
  if (natural == -INFINITY) {
    return SavedRow{INFINITY, 0.0f, delta[query]};
  }
  float scaled = natural * M_LOG2E_F;
  scaled = scaled < -FLT_MAX ? -FLT_MAX : scaled;  // where every key has the lowest float added
  return SavedRow{scaled, multiply_add(natural, M_LOG2E_F, -scaled), delta[query]};
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
  // Nothing is subtracted from what is hidden: lse may be NaN. Otherwise a score is above lse by no more than rounding,
  // and that of 1e38 is no small number. No min(), which would turn NaN into one.
  float exponent = score == -INFINITY ? -INFINITY : score - saved.lse - saved.rest;
  float probability = fast_exp2(exponent > 0 ? 0.0f : exponent);
  float gradient = probability * (dprobability - saved.delta) * visibility.derivative(scaled);
  return ScoreGradient{probability, shown || probability != 0 ? gradient : 0.0f};
}

}  // namespace flashattn
