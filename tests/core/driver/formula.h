// Computes attention and its gradients by the plain formulas, one row of scores at a time, in arithmetic of type
// `Real`.
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

// The order in which sum_over() adds columns. plain_gradients() takes two sums in different orders and subtracts them.
// In the same order, their rounding errors could cancel. The kernels' errors do not cancel, so the error that tests
// allow would be too small.
enum class Order { up, down };

template <typename Real, typename Term>
Real sum_over(int columns, Order order, Term term) {
  Real sum = 0;
  for (int d = 0; d < columns; ++d) sum += term(order == Order::up ? d : columns - 1 - d);
  return sum;
}

struct RowIndex {
  int64_t batch;
  int head, kv_head, query;
};

template <typename Real>
struct Score {
  Real logit;  // input of the softmax
  Real slope;  // the derivative of softcap
};

template <typename Real>
Score<Real> plain_score(const Case& c, const Inputs& in, RowIndex row, int key, Order order) {
  Score<Real> score = {sum_over<Real>(c.head_dim, order,
                                      [&](int d) {
                                        return Real(in.query.at(row.batch, row.head, row.query, d)) *
                                               Real(in.key.at(row.batch, row.kv_head, key, d));
                                      }) *
                           Real(scale_of(c)),
                       1};
  if (c.softcap > 0) {
    Real capped = std::tanh(score.logit / Real(c.softcap));
    score = {Real(c.softcap) * capped, 1 - capped * capped};
  }
  if (c.alibi) {
    score.logit -=
        Real(in.alibi_slopes.at(row.batch, row.head, 0, 0)) * Real(std::abs(row.query + c.key_len - c.query_len - key));
  }
  if (c.bias) score.logit += Real(in.bias.at(row.batch, row.head, row.query, key));
  return score;
}

template <typename Real>
struct PlainRow {
  RowIndex at;
  std::vector<int> seen;  // the keys that the row sees
  std::vector<Real> logits;
  Real max, sum;  // the row maximum and the softmax denominator; both include the sink

  Real lse() const { return seen.empty() ? -std::numeric_limits<Real>::infinity() : max + std::log(sum); }
};

// Calls visit(row) for each row, in the order of (batch, head, query).
template <typename Real, typename Visit>
void for_each_row(const Case& c, const Inputs& in, Visit visit) {
  for (int64_t index = 0; index < c.batch_size() * c.heads() * c.query_len; ++index) {
    int head = static_cast<int>(index / c.query_len % c.heads());
    PlainRow<Real> row = {
        {index / c.query_len / c.heads(), head, head / c.group, static_cast<int>(index % c.query_len)},
        {},
        {},
        -std::numeric_limits<Real>::infinity(),
        0};
    for (int j = 0; j < c.key_len; ++j) {
      if (!sees(c, in, row.at.batch, head, row.at.query, j)) continue;
      row.seen.push_back(j);
      row.logits.push_back(plain_score<Real>(c, in, row.at, j, Order::up).logit);
      row.max = std::max(row.max, row.logits.back());
    }
    Real sink = c.sinks ? Real(in.sinks.at(row.at.batch, head, 0, 0)) : -std::numeric_limits<Real>::infinity();
    row.max = std::max(row.max, sink);
    for (Real logit : row.logits) row.sum += std::exp(logit - row.max);
    if (c.sinks) row.sum += std::exp(sink - row.max);
    visit(row);
  }
}

struct Outputs {
  std::vector<double> out, lse;  // have the shapes (batch, head, row, column) and (batch, head, row)
};

template <typename Real>
Outputs plain_attention(const Case& c, const Inputs& in) {
  Outputs result;
  std::vector<Real> out(static_cast<size_t>(c.value_dim));
  for_each_row<Real>(c, in, [&](const PlainRow<Real>& row) {
    std::fill(out.begin(), out.end(), Real(0));
    for (size_t k = 0; k < row.seen.size(); ++k) {
      Real weight = std::exp(row.logits[k] - row.max) / row.sum;
      for (int d = 0; d < c.value_dim; ++d) {
        out[size_t(d)] += weight * Real(in.value.at(row.at.batch, row.at.kv_head, row.seen[k], d));
      }
    }
    result.out.insert(result.out.end(), out.begin(), out.end());
    result.lse.push_back(double(row.lse()));
  });
  return result;
}

// The gradients of a loss with respect to out and lse.
struct Cotangents {
  Tensor out, lse;
};

struct Gradients {
  std::vector<double> query, key, value;  // (batch, head, row, column)
  std::vector<double> delta;              // (batch, head, row)
};

// `out` is the result of plain_attention<Real>(). This function computes lse itself.
template <typename Real>
Gradients plain_gradients(const Case& c, const Inputs& in, const Cotangents& cotangents,
                          const std::vector<double>& out) {
  const auto zeros = [&](int heads, int rows, int columns) {
    return std::vector<Real>(static_cast<size_t>(c.batch_size() * heads * rows * columns));
  };
  std::vector<Real> of_query = zeros(c.heads(), c.query_len, c.head_dim),
                    of_key = zeros(c.kv_heads, c.key_len, c.head_dim),
                    of_value = zeros(c.kv_heads, c.key_len, c.value_dim), deltas;
  for_each_row<Real>(c, in, [&](const PlainRow<Real>& row) {
    RowIndex at = row.at;
    size_t index = deltas.size(), first_key = size_t(at.batch * c.kv_heads + at.kv_head) * size_t(c.key_len);
    const auto of_out = [&](int d) { return Real(cotangents.out.at(at.batch, at.head, at.query, d)); };
    Real lse = row.lse();
    Real delta = sum_over<Real>(c.value_dim, Order::down,
                                [&](int d) { return Real(out[index * size_t(c.value_dim) + size_t(d)]) * of_out(d); });
    delta -= Real(cotangents.lse.at(at.batch, at.head, at.query, 0));
    deltas.push_back(delta);

    for (int j : row.seen) {
      size_t key = first_key + size_t(j);
      Score<Real> score = plain_score<Real>(c, in, at, j, Order::down);
      Real weight = std::exp(score.logit - lse);
      Real of_weight = sum_over<Real>(c.value_dim, Order::up,
                                      [&](int d) { return of_out(d) * Real(in.value.at(at.batch, at.kv_head, j, d)); });
      Real of_product = weight * (of_weight - delta) * score.slope * Real(scale_of(c));
      for (int d = 0; d < c.value_dim; ++d) of_value[key * size_t(c.value_dim) + size_t(d)] += weight * of_out(d);
      for (int d = 0; d < c.head_dim; ++d) {
        of_query[index * size_t(c.head_dim) + size_t(d)] += of_product * Real(in.key.at(at.batch, at.kv_head, j, d));
        of_key[key * size_t(c.head_dim) + size_t(d)] += of_product * Real(in.query.at(at.batch, at.head, at.query, d));
      }
    }
  });
  const auto doubles = [](const std::vector<Real>& numbers) {
    return std::vector<double>(numbers.begin(), numbers.end());
  };
  return {doubles(of_query), doubles(of_key), doubles(of_value), doubles(deltas)};
}

}  // namespace flashattn::driver
