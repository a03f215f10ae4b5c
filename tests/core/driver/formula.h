// Attention and its gradients by the plain formulas, one row of scores at a time. Real is what they compute in.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "inputs.h"

namespace flashattn::driver {

inline float scale_of(const Case& c) {
  return 1 / std::sqrt(static_cast<float>(c.head_dim));
}

template <typename Real>
struct PlainRow {
  int64_t index, batch;
  int head, kv_head, query;
  std::vector<int> seen;      // keys, and of each of them ...
  std::vector<Real> score;    // ... what its weight is the exponential of, ...
  std::vector<Real> passing;  // ... and the derivative of softcap
};

// Calls visit(row) for each row, in the order of (batch, head, query).
template <typename Real, typename Visit>
void for_each_row(const Case& c, const Inputs& in, Visit visit) {
  for (int64_t index = 0; index < c.batch_size() * c.heads() * c.query_len; ++index) {
    int64_t b = index / c.query_len / c.heads();
    int h = static_cast<int>(index / c.query_len % c.heads()), i = static_cast<int>(index % c.query_len);
    PlainRow<Real> row = {index, b, h, h / c.group, i, {}, {}, {}};
    for (int j = 0; j < c.key_len; ++j) {
      if (!sees(c, in, b, h, i, j)) continue;
      Real score = 0, passing = 1;
      for (int d = 0; d < c.head_dim; ++d)
        score += Real(in.query.at(b, h, i, d)) * Real(in.key.at(b, row.kv_head, j, d));
      score *= Real(scale_of(c));
      if (c.softcap > 0) {
        Real capped = std::tanh(score / Real(c.softcap));
        score = Real(c.softcap) * capped;
        passing = 1 - capped * capped;
      }
      if (c.alibi) score -= Real(in.alibi_slopes.at(b, h, 0, 0)) * Real(std::abs(i + c.key_len - c.query_len - j));
      if (c.bias) score += Real(in.bias.at(b, h, i, j));
      row.seen.push_back(j);
      row.score.push_back(score);
      row.passing.push_back(passing);
    }
    visit(row);
  }
}

struct Outputs {
  std::vector<double> out, lse;  // (batch, head, row, column) and (batch, head, row)
};

template <typename Real>
Outputs plain_attention(const Case& c, const Inputs& in) {
  Outputs result;
  std::vector<Real> out(static_cast<size_t>(c.value_dim));
  for_each_row<Real>(c, in, [&](const PlainRow<Real>& row) {
    Real row_max = -std::numeric_limits<Real>::infinity(), row_sum = 0;
    for (Real score : row.score) row_max = std::max(row_max, score);
    if (c.sinks) row_max = std::max(row_max, Real(in.sinks.at(row.batch, row.head, 0, 0)));
    for (Real score : row.score) row_sum += std::exp(score - row_max);
    if (c.sinks) row_sum += std::exp(Real(in.sinks.at(row.batch, row.head, 0, 0)) - row_max);
    std::fill(out.begin(), out.end(), Real(0));
    for (size_t k = 0; k < row.seen.size(); ++k) {
      Real weight = std::exp(row.score[k] - row_max) / row_sum;
      for (int d = 0; d < c.value_dim; ++d) {
        out[size_t(d)] += weight * Real(in.value.at(row.batch, row.kv_head, row.seen[k], d));
      }
    }
    result.out.insert(result.out.end(), out.begin(), out.end());
    result.lse.push_back(row.seen.empty() ? -kInf : double(row_max + std::log(row_sum)));
  });
  return result;
}

// What comes back for out and lse.
struct Cotangents {
  Tensor out, lse;
  bool of_lse;  // otherwise nothing does
};

struct Gradients {
  std::vector<double> query, key, value;  // (batch, head, row, column)
  std::vector<double> delta;              // (batch, head, row)
};

// `kept` is what the forward pass has left, rounded to the dtypes of out and lse: the gradient is a function of that.
// A weight too small for float32 is 0, and a weight of 0 lets nothing through, NaN neither.
template <typename Real>
Gradients plain_gradients(const Case& c, const Inputs& in, const Cotangents& cotangents, const Outputs& kept) {
  const auto zeros = [&](int heads, int rows, int columns) {
    return std::vector<Real>(static_cast<size_t>(c.batch_size() * heads * rows * columns));
  };
  std::vector<Real> of_query = zeros(c.heads(), c.query_len, c.head_dim),
                    of_key = zeros(c.kv_heads, c.key_len, c.head_dim),
                    of_value = zeros(c.kv_heads, c.key_len, c.value_dim), deltas;
  for_each_row<Real>(c, in, [&](const PlainRow<Real>& row) {
    size_t index = size_t(row.index), first_key = size_t(row.batch * c.kv_heads + row.kv_head) * size_t(c.key_len);
    std::vector<Real> from_out(static_cast<size_t>(c.value_dim));
    // From the last column to the first, as the sums of of_weight are not: where one key has all of the weight, the two
    // would err alike, and their difference not at all.
    Real delta = 0;
    for (int d = c.value_dim; d-- > 0;) {
      from_out[size_t(d)] = Real(cotangents.out.at(row.batch, row.head, row.query, d));
      delta += Real(kept.out[index * size_t(c.value_dim) + size_t(d)]) * from_out[size_t(d)];
    }
    if (cotangents.of_lse) delta -= Real(cotangents.lse.at(row.batch, row.head, row.query, 0));
    deltas.push_back(delta);

    for (size_t k = 0; k < row.seen.size(); ++k) {
      Real weight = std::exp(row.score[k] - Real(kept.lse[index]));
      if (weight < Real(std::numeric_limits<float>::min())) continue;
      size_t key = first_key + size_t(row.seen[k]);
      Real of_weight = 0;
      for (int d = 0; d < c.value_dim; ++d) {
        of_weight += from_out[size_t(d)] * Real(in.value.at(row.batch, row.kv_head, row.seen[k], d));
        of_value[key * size_t(c.value_dim) + size_t(d)] += weight * from_out[size_t(d)];
      }
      Real of_score = weight * (of_weight - delta) * row.passing[k] * Real(scale_of(c));
      for (int d = 0; d < c.head_dim; ++d) {
        of_query[index * size_t(c.head_dim) + size_t(d)] +=
            of_score * Real(in.key.at(row.batch, row.kv_head, row.seen[k], d));
        of_key[key * size_t(c.head_dim) + size_t(d)] += of_score * Real(in.query.at(row.batch, row.head, row.query, d));
      }
    }
  });
  const auto doubles = [](const std::vector<Real>& numbers) {
    return std::vector<double>(numbers.begin(), numbers.end());
  };
  return {doubles(of_query), doubles(of_key), doubles(of_value), doubles(deltas)};
}

}  // namespace flashattn::driver
